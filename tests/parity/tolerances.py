"""The one table of tolerances. Loosening a row needs a reason in the commit."""

# Relative tolerance of a loss curve against another implementation, float32.
REFERENCE_LOSS = 1e-4
# Relative to the largest of a parameter: second moments after 20 steps, sums of squared gradients
# of runs whose losses differ by up to REFERENCE_LOSS.
REFERENCE_MOMENTS = 2e-4
# Absolute and relative tolerance of logits against another implementation, float32: for the same
# parameters of T5X and of Hugging Face, whose models sum in other orders.
REFERENCE_LOGITS = 1e-5
HUGGING_FACE_LOGITS = 1e-4
# Relative to the largest of a parameter: gradients against Hugging Face's.
HUGGING_FACE_GRADIENT = 1e-4
# Relative tolerance of the same mathematics on another mesh, float32: only the order of sums moves.
MESH_LOSS = 2e-5
MESH_GRADIENT = 1e-5
