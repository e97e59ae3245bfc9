"""Cross-entropy over a large vocabulary without storing the logits.

>>> from cce import linear_cross_entropy
>>> loss = linear_cross_entropy(e, c, targets)     # e [N, D] hidden states, c [V, D] classifier, targets [N]
>>> loss.backward()                                # e.grad [N, D], c.grad [V, D]; no [N, V] tensor is needed
"""

from cce.loss import linear_cross_entropy
from cce.modules import LinearCrossEntropy, LinearCrossEntropyHead

__version__ = "0.1.0"
__all__ = ["LinearCrossEntropy", "LinearCrossEntropyHead", "linear_cross_entropy", "__version__"]
