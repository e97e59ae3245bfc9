"""Hugging Face models without logits in training: `cce.transformers.patch(model)`.

A causal language model of `transformers` computes `lm_head(hidden)` and then its loss. The patched `forward` stops at the hidden states
when it is given labels, and calls `linear_cross_entropy` with the head's weight. Without labels (generation) nothing changes.
"""

import functools
import inspect

from torch import Tensor, nn

from cce.loss import linear_cross_entropy


def patch(model: nn.Module, **options) -> nn.Module:
    """Replaces `model.forward` for calls with labels; returns the model.

    Args:
        model: a causal language model: `get_decoder()`, and an output embedding that is an `nn.Linear`. The final logit
            softcapping (Gemma 2) and the logit scales (Cohere's `logit_scale`, Granite's `logits_scaling`) of its config are honoured.
        options: of `linear_cross_entropy`, for instance impl="chunked" or z_loss=1e-4.

    The outputs have `loss` and `logits=None`. The loss is the mean over the batch's tokens, or their sum over `num_items_in_batch`
    where the Trainer passes that.

    Raises:
        TypeError: the model has no decoder or no linear head. ImportError: transformers is not installed.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if not isinstance(head, nn.Linear) or not hasattr(model, "get_decoder"):
        raise TypeError(
            f"model: expected a causal language model with get_decoder() and an nn.Linear head, got {type(model).__name__}"
        )
    options.setdefault("softcap", getattr(model.config, "final_logit_softcapping", None))
    scale = getattr(model.config, "logit_scale", 1.0) / getattr(model.config, "logits_scaling", 1.0)
    original = model.forward
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(*args, **kwargs):
        bound = signature.bind_partial(*args, **kwargs).arguments
        bound |= bound.pop("kwargs", {})
        labels: Tensor | None = bound.pop("labels", None)
        if labels is None:
            return original(*args, **kwargs)
        count = bound.pop("num_items_in_batch", None)
        for name in ("logits_to_keep", "return_dict"):
            bound.pop(name, None)
        outputs = model.get_decoder()(**bound)
        hidden = outputs.last_hidden_state
        hidden = hidden if scale == 1.0 else hidden * scale
        # Looked up at each call: FSDP and tied embeddings may have replaced the parameter.
        weight, bias = model.get_output_embeddings().weight, model.get_output_embeddings().bias
        reduction = "mean" if count is None else "sum"
        loss = linear_cross_entropy(hidden, weight, labels, bias, shift=1, reduction=reduction, **options)
        return CausalLMOutputWithPast(
            loss=loss if count is None else loss / count,
            logits=None,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    model.forward = forward
    return model
