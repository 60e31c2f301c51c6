"""Every model file has as many parameters as was published.

T5 and T5.1.1: Raffel et al. 2020, table 2, and the T5 repository: released_checkpoints.md; mT5: Xue
et al. 2021, table 1; ByT5: Xue et al. 2022, table 1 (rounded there). GPT-2: OpenAI's released
checkpoints. Llama-3, Mistral, Mixtral, Gemma-2 and 3, Qwen-2.5 and 3, SmolLM-3, OLMo-2, Phi-3 and
4, and BERT: the tensors of the published checkpoints, as their model cards on the Hugging Face hub
count them.
"""

import math
import pathlib
import re

import gin
import jax
import pytest

from t5x_gpu.partitioning.axis_rules import split_names

MODELS = pathlib.Path(__file__).parents[2] / 'gin_configs' / 'models'
PUBLISHED = {
  't5_small': 60_506_624,
  't5_base': 222_903_552,
  't5_large': 737_668_096,
  't5_3b': 2_851_598_336,
  't5_11b': 11_307_321_344,
  't5_1_1_small': 76_961_152,
  't5_1_1_base': 247_577_856,
  't5_1_1_large': 783_150_080,
  't5_1_1_xl': 2_849_757_184,
  't5_1_1_xxl': 11_135_332_352,
  'mt5_small': 300_176_768,
  'umt5_small': 306_601_984,
  'umt5_base': 592_043_520,
  'umt5_xl': 3_768_356_864,
  'umt5_xxl': 12_972_531_712,
  'mt5_base': 582_401_280,
  'mt5_large': 1_229_581_312,
  'mt5_xl': 3_742_619_648,
  'mt5_xxl': 12_921_057_280,
  'byt5_small': '300M',
  'byt5_base': '582M',
  'byt5_large': '1.23B',
  'byt5_xl': '3.74B',
  'byt5_xxl': '12.9B',
  'gpt2_small': 124_439_808,
  'gpt2_medium': 354_823_168,
  'gpt2_large': 774_030_080,
  'gpt2_xl': 1_557_611_200,
  'llama3_8b': 8_030_261_248,
  'llama3_70b': 70_553_706_496,
  'llama3_1_8b': 8_030_261_248,
  'llama3_2_1b': 1_235_814_400,
  'llama3_2_3b': 3_212_749_824,
  'gemma2_2b': 2_614_341_888,
  'gemma2_9b': 9_241_705_984,
  'gemma2_27b': 27_227_128_320,
  'mistral_7b': 7_241_732_096,
  'mistral_7b_v0_3': 7_248_023_552,
  'qwen2_5_0_5b': 494_032_768,
  'qwen2_5_7b': 7_615_616_512,
  'gemma3_270m': 268_098_176,
  'gemma3_1b': 999_885_952,
  'smollm3_3b': 3_075_098_624,
  'olmo2_1b': 1_484_916_736,
  'olmo2_7b': 7_298_617_344,
  'phi3_mini': 3_821_079_552,
  'phi4': 14_659_507_200,
  'qwen3_0_6b': 596_049_920,
  'qwen3_1_7b': 1_720_574_976,
  'qwen3_4b': 4_022_468_096,
  'qwen3_8b': 8_190_735_360,
  'qwen3_14b': 14_768_307_200,
  'qwen3_32b': 32_762_123_264,
  'mixtral_8x7b': 46_702_792_704,
  'qwen3_moe_30b_a3b': 30_532_122_624,
  'bert_base': 109_482_240,
  'bert_large': 335_141_888,
}
# Of our own making: nothing was published.
OURS = {
  'decoder_14m',
  'decoder_base',
  'decoder_demo',
  'decoder_moe_demo',
  'encoder_demo',
  'encoder_flatten',
  'encoder_small',
  'encoder_decoder_demo',
}


def counted(name: str) -> int:
  """Returns the parameters of a model file; of an encoder, those below its classifier."""
  gin.clear_config()
  gin.parse_config_file(str(MODELS / f'{name}.gin'))
  model = gin.query_parameter('%MODEL').scoped_configurable_fn()
  params, _ = split_names(jax.eval_shape(lambda: model.init(jax.random.key(0), None)))
  return sum(
    math.prod(x.shape)
    for part, tree in params.items()
    if part != 'classifier'
    for x in jax.tree.leaves(tree)
  )


def test_every_model_file_is_either_published_or_ours():
  assert {path.stem for path in MODELS.glob('*.gin')} == PUBLISHED.keys() | OURS


@pytest.mark.quick_cases(
  't5_small',
  't5_1_1_small',
  'mt5_small',
  'umt5_small',
  'byt5_small',
  'gpt2_small',
  'llama3_2_1b',
  'gemma2_2b',
  'mistral_7b',
  'qwen2_5_0_5b',
  'gemma3_270m',
  'qwen3_0_6b',
  'smollm3_3b',
  'olmo2_1b',
  'phi3_mini',
  'mixtral_8x7b',
  'qwen3_moe_30b_a3b',
)
@pytest.mark.parametrize('name', PUBLISHED)
def test_a_model_file_has_the_published_number_of_parameters(name):
  published, count = PUBLISHED[name], counted(name)
  if isinstance(published, str):
    unit = {'M': 1e6, 'B': 1e9}[published[-1]]
    decimals = len(published.partition('.')[2][:-1])
    assert f'{count / unit:.{decimals}f}{published[-1]}' == published
  else:
    assert count == published
  comment = (MODELS / f'{name}.gin').read_text(encoding='utf-8').split('from __gin__')[0]
  said = re.search(r'([\d,]{9,}) parameters', comment.replace('\n# ', ' '))
  assert said and int(said[1].replace(',', '')) == count
