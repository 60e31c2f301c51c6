"""Checks the arguments of an EncoderModel."""

from typing import Any

from t5x_gpu.errors import ModelError, did_you_mean
from t5x_gpu.models.encoding.pooling import POOLINGS
from t5x_gpu.models.losses import check_loss_options, refuse_router_losses

HEADS = ('classification', 'token_classification', 'regression', 'embedding', 'mlm')
SINGLE_LABEL, MULTI_LABEL = 'single_label_classification', 'multi_label_classification'
PROBLEMS = (SINGLE_LABEL, MULTI_LABEL)


def check_encoder(model: Any) -> None:
  """Raises ModelError for invalid or contradictory arguments of an EncoderModel."""
  check_loss_options('EncoderModel', z_loss=model.z_loss, label_smoothing=model.label_smoothing)
  if model.head_type != 'mlm':
    refuse_router_losses('EncoderModel', model.config)
  for name, allowed in (('head_type', HEADS), ('pooling', POOLINGS), ('problem_type', PROBLEMS)):
    value = getattr(model, name)
    if value not in allowed:
      raise ModelError(
        f'EncoderModel.{name} = {value!r} is not one of {", ".join(allowed)}.'
        f'{did_you_mean(value, allowed)}',
        fix=f'Set EncoderModel.{name} to one of them.',
        parameters=(f'EncoderModel.{name}',),
      )
  if model.has_classes:
    _check_classes(model)
  if model.embeds:
    _check_embedding(model)
  if model.regresses and (model.label_smoothing or model.z_loss):
    raise _not_cross_entropy(model, 'of a regression it is the squared error')
  if model.token_types and model.config.num_token_types < 2:
    raise ModelError(
      'EncoderModel.token_types = True, but TransformerConfig.num_token_types = '
      f'{model.config.num_token_types}: the model has no embeddings of token types.',
      fix='Set TransformerConfig.num_token_types = 2, or leave EncoderModel.token_types out.',
      parameters=('EncoderModel.token_types', 'TransformerConfig.num_token_types'),
    )


def _check_classes(model: Any) -> None:
  if model.num_classes < 2:
    raise ModelError(
      f'EncoderModel.num_classes = {model.num_classes}: classification needs two classes or more.',
      fix='Set EncoderModel.num_classes to 2 or more.',
      parameters=('EncoderModel.num_classes',),
    )
  count = len(set(model.class_names))
  if model.class_names and (count != len(model.class_names) or count != model.num_classes):
    raise ModelError(
      f'EncoderModel.class_names has {count} different names, and num_classes = '
      f'{model.num_classes}.',
      fix=f'Set EncoderModel.num_classes = {count}, and name each class once.',
      parameters=('EncoderModel.class_names', 'EncoderModel.num_classes'),
    )
  if model.tags and not model.class_names:
    raise ModelError(
      'Token classification needs the names of the tags: they show where an entity begins.',
      fix="Set EncoderModel.class_names = ('O', 'B-PER', 'I-PER', ...), all tags of your data.",
      parameters=('EncoderModel.class_names',),
    )
  if model.multi_label and (model.label_smoothing or model.z_loss):
    raise _not_cross_entropy(model, 'with several labels it is binary cross entropy')


def _not_cross_entropy(model: Any, instead: str) -> ModelError:
  return ModelError(
    f'label_smoothing = {model.label_smoothing} and z_loss = {model.z_loss} need a loss over one '
    f'class per row; {instead}.',
    fix='Set EncoderModel.label_smoothing = 0.0 and EncoderModel.z_loss = 0.0.',
    parameters=('EncoderModel.label_smoothing', 'EncoderModel.z_loss'),
  )


def _check_embedding(model: Any) -> None:
  wrong = [
    f'{name} = {getattr(model, name)!r}'
    for name, allowed in (
      ('pooling', model.pooling in ('mean', 'first_token')),
      ('head_mlp_dim', not model.head_mlp_dim),
      ('temperature', model.temperature > 0),
      ('label_smoothing', not model.label_smoothing),
      ('z_loss', not model.z_loss),
    )
    if not allowed
  ]
  if wrong:
    raise ModelError(
      f"EncoderModel.head_type = 'embedding' does not work with {', '.join(wrong)}.",
      fix="Set EncoderModel.pooling = 'mean' or 'first_token', a temperature above 0 (0.05 is "
      'usual), and head_mlp_dim, label_smoothing and z_loss to 0.',
      parameters=('EncoderModel.head_type',),
    )
