"""Which tokens two tokenizers have in common."""

import numpy as np
import pytest
from engine_helpers import LETTERS, MERGES, SPECIAL, VOCABULARY, other_tokenizer, spelled, tokenizer

from specjax.checkpoint import CheckpointError, match_vocabularies


def test_padding_is_ignored():
    one = tokenizer()
    assert match_vocabularies(one, one, VOCABULARY, VOCABULARY) == (None, None, VOCABULARY)
    assert match_vocabularies(one, one, VOCABULARY + 9, VOCABULARY) == (None, None, VOCABULARY)
    ids, reads, common = match_vocabularies(one, one, VOCABULARY, VOCABULARY + 3, intersection=True)
    np.testing.assert_array_equal(ids, [*range(VOCABULARY), -1, -1, -1])
    assert reads is None and common == VOCABULARY
    padded = spelled([*SPECIAL, *LETTERS, "[PAD259]", "[PAD260]"])
    assert match_vocabularies(spelled([*SPECIAL, *LETTERS]), padded, 262, 262).common == 259


def test_error_names_differing_tokens():
    words = [*SPECIAL, *LETTERS, *(a + b for a, b in MERGES)]
    for changed, message in {
        (*words[:-1], "Ġth"): rf"^its tokenizer is not the target's: id {len(words) - 1} is 'Ġthe' in the target's and "
        "'Ġth' in the draft's; to draft with",
        (*words[:-1],): rf"id {len(words) - 1} is 'Ġthe' in the target's and no token in the draft's;",
        (*words, "new"): rf"id {len(words)} is no token in the target's and 'new' in the draft's;",
        (words[1], words[0], *words[2:]): r"id 0 is '<\|endoftext\|>' in the target's and '<\|im_start\|>' in the",
        (*words[3:], *words[:3]): r"id 0 is .*, id 1 is .*, id 2 is .* \(265 ids differ\); to draft with",
    }.items():
        with pytest.raises(CheckpointError, match=message):
            match_vocabularies(tokenizer(), spelled(list(changed)), 265, 265)


def test_intersection():
    ours, theirs = tokenizer().get_vocab(), other_tokenizer().get_vocab()
    ids, reads, common = match_vocabularies(tokenizer(), other_tokenizer(), 270, 265, intersection=True)
    assert ids is not None and reads is not None and common == 256 + 2, "bytes, `he` and <|im_end|>"
    for token, i in theirs.items():
        assert ids[i] == ours.get(token, -1)
        assert token not in ours or reads[ours[token]] == i
    assert (ids[261:] == -1).all()
    assert reads[ours["hell"]] == theirs["l"] and reads[ours["Ġthe"]] == theirs["he"], "the last piece"
    assert reads[ours["<|im_start|>"]] == theirs[">"]
    # Rows that the draft does not have are not read.
    assert match_vocabularies(tokenizer(), other_tokenizer(), 270, 100, intersection=True).reads.max() < 100


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("SentencePiece", "its tokenizer is SentencePiece, the target's byte-level; both must be"),
        ("none", "its tokenizer is of an unknown kind, the target's byte-level"),
    ],
)
def test_tokenizers_of_other_kinds(kind, message):
    with pytest.raises(CheckpointError, match=message):
        match_vocabularies(tokenizer(), spelled(["a", "b"], kind=kind), 270, 270, intersection=True)
    with pytest.raises(CheckpointError, match="has no token of the target's, special ones aside"):
        match_vocabularies(tokenizer(), spelled([*SPECIAL, "xyz"]), 270, 270, intersection=True)
