"""Tokens per second of greedy decoding, ours and `transformers.generate` with its cache.

    python benchmarks/decode.py

One random model, converted; the same prompts; float32 on the CPU. Ours and theirs, with one thread
and with all, take turns, so that other load on the machine falls on each. How many of the texts
differ is written, too. Writes decode.json.
Needs torch and transformers.
"""

import argparse
import datetime
import functools
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import numpy as np
import torch
import transformers

from t5x_gpu import convert
from t5x_gpu.checkpoint.params_files import ParamsReader
from t5x_gpu.conversion.conversion import params_of_checkpoint
from t5x_gpu.models.decoding import DecodingConfig
from t5x_gpu.models.inference.generation import Generator, by_layer
from t5x_gpu.partitioning.partitioner import Partitioner
from t5x_gpu.runtime.topology import Topology

OUT = pathlib.Path(__file__).parent / 'results' / 'decode.json'
PROMPT, NEW = 64, 128
MODELS = {
  'llama, 41.6M': transformers.LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
    bos_token_id=None,
    eos_token_id=None,
  ),
  'gpt2, 51.5M': transformers.GPT2Config(
    vocab_size=50304, n_embd=512, n_layer=8, n_head=8, bos_token_id=None, eos_token_id=None
  ),
}


def make_both(config: Any, folder: pathlib.Path) -> tuple[Any, Any, Any]:
  """Returns their model, ours, and our parameters."""
  torch.manual_seed(0)
  theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
  theirs.save_pretrained(folder / 'theirs')
  convert.main([f'--from={folder / "theirs"}', f'--to={folder / "ours"}', '--check=tensors'])
  ours = convert.model_of_gin([folder / 'ours' / 'model.gin']).build()
  return theirs, ours, params_of_checkpoint(ParamsReader(folder / 'ours'))


def _copied(params: Any, layout: Any) -> Any:
  return jax.device_put(jax.device_get(params), layout.replicated)


def measure(
  theirs: Any, ours: Any, params: Any, *, batch: int, rounds: int, threads: list[int]
) -> dict[str, Any]:
  """Returns seconds and tokens per second of both, and their ratio.

  The smallest CPU seconds are returned too; they exclude other programs.
  """
  prompts = np.random.default_rng(0).integers(1, theirs.config.vocab_size, (batch, PROMPT))
  layout = Partitioner().lay_out(
    Topology(1, 1), jax.devices()[:1], logical_sizes={**ours.logical_sizes(), 'batch': batch}
  )
  generator = Generator(
    ours,
    by_layer(ours, _copied(params, layout), layout=layout),
    layout=layout,
    config=DecodingConfig(max_decode_length=NEW, start_token=None, batch_size=batch),
  )
  rows, given = prompts.tolist(), torch.from_numpy(prompts)

  def our_texts() -> list[list[int]]:
    return [list(text.tokens) for [text] in generator.generate(rows)]

  def their_texts(threads: int) -> list[list[int]]:
    torch.set_num_threads(threads)
    with torch.inference_mode():
      return theirs.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=False,
        max_new_tokens=NEW,
        min_new_tokens=NEW,
        pad_token_id=0,
        use_cache=True,
        suppress_tokens=[0],
      )[:, PROMPT:].tolist()

  begin = time.monotonic()
  first = our_texts()
  compile_seconds = time.monotonic() - begin
  different = sum(a != b for a, b in zip(first, their_texts(1)))
  cases = {
    'ours': our_texts,
    **{  # next to other work, torch is faster with fewer threads
      f'theirs, {n} threads': functools.partial(their_texts, n) for n in threads
    },
  }
  seconds: dict[str, list[float]] = {name: [] for name in cases}
  cpu_seconds = {name: [] for name in cases}
  for _ in range(rounds):
    for name, texts in cases.items():
      begin, cpu_begin = time.monotonic(), time.process_time()
      texts()
      seconds[name].append(time.monotonic() - begin)
      cpu_seconds[name].append(time.process_time() - cpu_begin)
  theirs_best = [min(s) for s in zip(*(seconds[n] for n in cases if n != 'ours'))]
  ratios = [b / a for a, b in zip(seconds['ours'], theirs_best)]
  return {
    'batch': batch,
    'rows_with_other_text': different,
    'first_call_seconds': round(compile_seconds, 2),
    'tokens_per_second': {n: round(batch * NEW / min(s), 1) for n, s in seconds.items()},
    'median_tokens_per_second': {
      n: round(batch * NEW / statistics.median(s), 1) for n, s in seconds.items()
    },
    'seconds': {n: [round(x, 3) for x in s] for n, s in seconds.items()},
    'cpu_seconds': {n: round(min(s), 2) for n, s in cpu_seconds.items()},
    'ours_to_theirs': round(min(theirs_best) / min(seconds['ours']), 2),
    'ours_to_theirs_by_round': [round(x, 2) for x in ratios],
  }


def main() -> None:
  """Measures every model at every batch, prints, writes."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--rounds', type=int, default=5)
  parser.add_argument('--batches', default='1,16')
  parser.add_argument('--models', default=','.join(name.split(',')[0] for name in MODELS))
  parser.add_argument('--threads', default=f'1,{os.cpu_count()}', help='of torch')
  parser.add_argument('--out', default=str(OUT))
  args = parser.parse_args()
  threads = sorted({int(n) for n in args.threads.split(',')})
  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  results = {
    'command': ' '.join(['python benchmarks/decode.py', *sys.argv[1:]]),
    'date': datetime.date.today().isoformat(),
    'machine': f'{os.cpu_count()} CPU cores',
    'load_at_start': round(os.getloadavg()[0], 2),
    'python': sys.version.split()[0],
    'jax': jax.__version__,
    'torch': torch.__version__,
    'transformers': transformers.__version__,
    'dtype': 'float32',
    'prompt_tokens': PROMPT,
    'new_tokens': NEW,
    'tokens_per_second': 'of the fastest round',
    'models': {},
  }
  for name, config in MODELS.items():
    if name.split(',')[0] not in args.models.split(','):
      continue
    with tempfile.TemporaryDirectory() as folder:
      both = make_both(config, pathlib.Path(folder))
    found = [
      measure(*both, batch=int(batch), rounds=args.rounds, threads=threads)
      for batch in args.batches.split(',')
    ]
    results['models'][name] = found
    for one in found:
      print(name, json.dumps(one), flush=True)
  pathlib.Path(args.out).write_text(json.dumps(results, indent=1) + '\n')


if __name__ == '__main__':
  main()
