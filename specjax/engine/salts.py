"""From a request's `cache_salt` to the 32 bits that keep its n-gram memory apart."""

from __future__ import annotations

import hashlib
import itertools
import secrets


class Salts:
    """Equal texts give equal words in one engine. A key of its own keeps clients from choosing texts that collide.

    Args:
        isolate: a request without a `cache_salt` gets a word that no other has, instead of the common 0.
    """

    def __init__(self, *, isolate: bool) -> None:
        self._key = secrets.token_bytes(16)
        self._numbers = itertools.count() if isolate else None

    def __call__(self, cache_salt: str | None) -> int:
        """A 32-bit word, not 0 where the request is to be kept apart."""
        if cache_salt is not None:
            return self._word(b"salt" + cache_salt.encode("utf-8", "surrogatepass"))
        return 0 if self._numbers is None else self._word(b"request" + str(next(self._numbers)).encode())

    def _word(self, text: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(text, key=self._key, digest_size=4).digest(), "little") or 1
