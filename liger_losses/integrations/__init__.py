"""Fused heads inside other libraries' models and trainers.

`liger_losses.integrations.transformers` fuses the language-model head of a live model, `liger_losses.integrations.trl`
those of a trainer that is already built. Each needs its library installed; nothing else in the package imports them.
"""
