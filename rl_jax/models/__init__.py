"""The table of model families. It imports nothing, so a name is checked before jax is loaded.

A builder is `(settings: ModelSettings, vocab_size: int) -> model.Model`; any name may also be
"package.module:attribute".
"""

MODELS = {
    "decoder": "rl_jax.models.decoder:build_model",
}
