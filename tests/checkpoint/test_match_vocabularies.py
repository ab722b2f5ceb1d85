"""Comparison of two tokenizers' tokens and ids."""

import numpy as np
import pytest
from engine_helpers import LETTERS, MERGES, SPECIAL, VOCABULARY, spelled, tokenizer

from specjax.checkpoint import CheckpointError, match_vocabularies


def test_padding_is_ignored():
    one = tokenizer()
    assert match_vocabularies(one, one, VOCABULARY, VOCABULARY) is None
    assert match_vocabularies(one, one, VOCABULARY + 9, VOCABULARY) is None
    ids = match_vocabularies(one, one, VOCABULARY, VOCABULARY + 3)
    np.testing.assert_array_equal(ids, [*range(VOCABULARY), -1, -1, -1])
    padded = spelled([*SPECIAL, *LETTERS, "[PAD259]", "[PAD260]"])
    assert match_vocabularies(spelled([*SPECIAL, *LETTERS]), padded, 259, 259) is None


def test_error_names_differing_tokens():
    words = [*SPECIAL, *LETTERS, *(a + b for a, b in MERGES)]
    for changed, message in {
        (*words[:-1], "Ġth"): rf"^its tokenizer is not the target's: id {len(words) - 1} is 'Ġthe' in the target's and "
        "'Ġth' in the draft's; a draft model with",
        (*words[:-1],): rf"id {len(words) - 1} is 'Ġthe' in the target's and no token in the draft's;",
        (*words, "new"): rf"id {len(words)} is no token in the target's and 'new' in the draft's;",
        (words[1], words[0], *words[2:]): r"id 0 is '<\|endoftext\|>' in the target's and '<\|im_start\|>' in the",
        (*words[3:], *words[:3]): r"id 0 is .*, id 1 is .*, id 2 is .* \(265 ids differ\); a draft model with",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            match_vocabularies(tokenizer(), spelled(list(changed)), 265, 265)
