"""Names of feature converters -> SeqIO's converters.

What each gives is written down without TF in `t5x_gpu.data.features`.
"""

from t5x_gpu.data import features
from t5x_gpu.data.tf_runtime import seqio
from t5x_gpu.errors import DataError

CONVERTERS = {
    'lm': seqio.LMFeatureConverter,
    'prefix_lm': seqio.PrefixLMFeatureConverter,
    'encoder_decoder': seqio.EncDecFeatureConverter,
}
assert CONVERTERS.keys() == features.LAYOUTS.keys()


def feature_converter(name: str, *, pack: bool,
                      loss_on_targets_only: bool = True) -> seqio.FeatureConverter:
  """Returns SeqIO's converter called `name`.

  Args:
    name: 'lm', 'prefix_lm' or 'encoder_decoder'.
    pack: put several examples into one row.
    loss_on_targets_only: 'prefix_lm' only: weight 0 on the inputs.
  Raises:
    ConfigError: no such converter.
    DataError: `loss_on_targets_only=False` where no inputs share the sequence with the targets.
  """
  features.layout(name)
  if name == 'prefix_lm':
    return CONVERTERS[name](pack=pack, loss_on_targets_only=loss_on_targets_only)
  if not loss_on_targets_only:
    raise DataError(
        f'loss_on_targets_only = False has no meaning for feature converter {name!r}: the decoder '
        'sees targets alone.',
        fix="Leave DatasetConfig.loss_on_targets_only at True, or take feature converter "
            "'prefix_lm'.",
        parameters=('DatasetConfig.loss_on_targets_only',))
  return CONVERTERS[name](pack=pack)
