"""A drafter as somebody would add it: one file, with the options and the functions. `LOOKUP` repeats the text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import jax.numpy as jnp

from specjax.drafters import Drafter, DraftOptions, Speculation
from specjax.drafters.options import Loaded
from specjax.limits import documented, setting
from specjax.tree import chain


@documented
@dataclass(frozen=True)
class Lookup(DraftOptions):
    """Drafts what followed the last token where it stood before."""

    algorithm: ClassVar[str] = "LOOKUP"

    span: int = setting(4, "tokens of a draft", minimum=1, maximum=16)
    occurrence: Literal["latest", "earliest"] = setting("latest", "which occurrence to continue", parse=str.lower)
    places: tuple[str, ...] | None = setting(None, "nothing; a list, as some options are", digits=True)

    def speculation(self, loaded: Loaded) -> Speculation:
        return Speculation(lookup_drafter(self), note=f"{self.span} tokens after the {self.occurrence} occurrence")


def lookup_drafter(options: Lookup) -> Drafter:
    def propose(params, state, context):
        end = context.prefix_length[:, None]
        places = jnp.arange(context.room, dtype=jnp.int32)[None, :]
        matches = (context.committed(places) == context.root[:, None]) & (places < end)
        best = jnp.max(jnp.where(matches, places, -1), axis=1)
        if options.occurrence == "earliest":
            best = jnp.where(best < 0, -1, jnp.argmax(matches, axis=1).astype(jnp.int32))
        at = best[:, None] + 1 + jnp.arange(options.span, dtype=jnp.int32)[None, :] % (end - best[:, None])
        tokens = jnp.where(at == end, context.root[:, None], context.committed(at))
        length = jnp.where(context.active & (best >= 0), options.span, 0)
        return chain(context.root, tokens, length, jnp.zeros(tokens.shape, jnp.float32)), state

    return Drafter(
        "LOOKUP",
        features=None,
        width=options.span + 1,
        depth=options.span,
        init=lambda params, rows, pool: (),
        propose=propose,
        observe=lambda params, state, context, observation: state,
        reads_tokens=True,
    )
