"""The twin of `hvdtrain.torch.gpt` for Keras, of Keras's own layers: the same first weights, the same logits."""

from typing import Any

import keras
import numpy as np
from keras import layers, ops

from hvdtrain.core import network
from hvdtrain.core.recipe import Recipe
from hvdtrain.datasets import Dataset
from hvdtrain.tensorflow.networks import POLICIES


def model(recipe: Recipe, dataset: Dataset) -> keras.Model:
    """The network of the recipe: tokens int64 [n, sequence_length] -> logits [n, sequence_length, vocabulary]."""
    sizes, end = network.GPT(**recipe.model_args), network.end_of(recipe, dataset)
    vocabulary, context, width = dataset.classes or 0, recipe.sequence_length, sizes.width
    policy = keras.DTypePolicy(POLICIES[recipe.precision])

    def dense(x: Any, outputs: int, name: str) -> Any:
        return layers.Dense(outputs, dtype=policy, name=name)(x)

    def norm(x: Any, name: str) -> Any:
        return layers.LayerNormalization(epsilon=1e-5, dtype=policy, name=name)(x)

    def drop(x: Any) -> Any:
        return layers.Dropout(sizes.dropout, dtype=policy)(x) if sizes.dropout else x

    def attention(x: Any, mask: Any, name: str) -> Any:
        size = width // sizes.heads
        of_heads = layers.Reshape((context, 3, sizes.heads, size), dtype=policy)(dense(x, 3 * width, f"{name}.c_attn"))
        query, key, value = ops.unstack(of_heads, 3, axis=2)
        # With a scale that is given: Keras's own is rounded to float32.
        seen = ops.dot_product_attention(query, key, value, mask=mask, scale=size**-0.5, is_causal=True)
        return dense(layers.Reshape((context, width), dtype=policy)(seen), width, f"{name}.c_proj")

    tokens = keras.Input((context,), dtype="int64", name="tokens")
    mask, positions = None, ops.zeros_like(tokens) + np.arange(context)
    if end is not None:
        ends = ops.cast(ops.equal(tokens, end), "float32")  # as GPUs add up no integers
        document = ops.cumsum(ends, axis=1) - ends
        inside = ops.equal(ops.expand_dims(document, 2), ops.expand_dims(document, 1))
        positions = ops.cast(ops.sum(ops.tril(ops.cast(inside, "float32")), axis=2) - 1, "int64")
        mask = ops.expand_dims(inside, 1)
    of_token = layers.ReversibleEmbedding(
        vocabulary, width, reverse_dtype=policy.compute_dtype, dtype=policy, name="wte"
    )
    of_position = layers.Embedding(context, width, dtype=policy, name="wpe")
    x = drop(layers.Add(dtype=policy)([of_token(tokens), of_position(positions)]))
    for name in (f"h.{layer}" for layer in range(sizes.layers)):
        x = layers.Add(dtype=policy)([x, drop(attention(norm(x, f"{name}.ln_1"), mask, f"{name}.attn"))])
        wide = ops.gelu(dense(norm(x, f"{name}.ln_2"), 4 * width, f"{name}.mlp.c_fc"), approximate=True)
        x = layers.Add(dtype=policy)([x, drop(dense(wide, width, f"{name}.mlp.c_proj"))])
    made = keras.Model(tokens, of_token(norm(x, "ln_f"), reverse=True))
    own = {weight.path.replace("/", "."): weight for weight in made.weights}
    norms = network.norms_of(sizes.shapes(vocabulary, context))
    for name, array in sizes.first_weights(vocabulary, context, recipe.seed):
        weight = own[network.in_tensorflow(name, norms)]
        weight.assign(array.T if name.rpartition(".")[0] not in network.EMBEDDINGS else array)
    return made
