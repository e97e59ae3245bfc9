"""Hugging Face models built from a config, no download: the patched loss and gradients are the model's own."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from cce.transformers import patch  # noqa: E402

SMALL = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16,
)  # fmt: skip
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SMALL, final_logit_softcapping=2.0, tie_word_embeddings=True)
    ),
    "cohere": lambda: transformers.CohereForCausalLM(transformers.CohereConfig(**SMALL, logit_scale=0.25)),
    "granite": lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**SMALL, logits_scaling=4.0)),
}


def loss_and_gradients(model, **inputs):
    model.zero_grad()
    outputs = model(**inputs)
    outputs.loss.backward()
    return outputs, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_same_loss_and_gradients_without_logits(name):
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    ids = torch.randint(0, 97, (2, 12))
    labels = ids.masked_fill(torch.rand(2, 12) < 0.3, -100)
    inputs = dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
    want, want_gradients = loss_and_gradients(model, **inputs)
    logits = model(input_ids=ids).logits
    patch(model)
    got, gradients = loss_and_gradients(model, **inputs)
    assert got.logits is None
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-6)
    assert gradients.keys() == want_gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(gradient, want_gradients[key], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(model(input_ids=ids).logits, logits)  # generation is untouched
    torch.testing.assert_close(model(ids, labels=labels).loss, want.loss, rtol=1e-5, atol=1e-6)  # positional ids
    count = int((labels[:, 1:] != -100).sum())
    summed = model(**inputs, num_items_in_batch=2 * count).loss
    torch.testing.assert_close(summed, want.loss / 2, rtol=1e-5, atol=1e-6)


def test_options_reach_the_loss():
    model = patch(MODELS["llama"](), impl="nonsense")
    ids = torch.randint(0, 97, (1, 4))
    with pytest.raises(ValueError, match="impl"):
        model(input_ids=ids, labels=ids)


def test_what_is_no_language_model_is_refused():
    with pytest.raises(TypeError, match="model: .*nn.Linear head, got Linear"):
        patch(torch.nn.Linear(2, 2))
