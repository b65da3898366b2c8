"""Images in prompts: how many tokens a size becomes."""

import pytest

from maxmoe import chat


@pytest.mark.parametrize(
    ("width", "height", "tokens"),
    [
        (28, 28, 1),
        (64, 30, 6),  # padded to 84 x 56
        (1, 1, 1),
        (29, 28, 2),
        (3584, 3584, 16_384),  # as many patches as are allowed
        (3585, 3585, 128 * 128 + 2 * 128 + 1),  # the same number of whole patches, not scaled, and padded
        (10_000, 10_000, 129 * 129),  # scaled to 3585, then padded
        (7168, 28, 256),
        (14_336, 28, 256),  # at most 512 patches wide
        (100_000, 1, 256),
    ],
)
def test_num_vision_tokens(width, height, tokens):
    assert chat.num_vision_tokens(width, height) == tokens


def test_image_prompt_names_the_size_as_given():
    assert chat.image_prompt(64, 30) == (
        "<|media_begin|>image 64x30<|media_content|>" + "<|media_pad|>" * 6 + "<|media_end|>"
    )


def test_image_without_pixels_is_refused():
    with pytest.raises(ValueError, match="0 x 5 pixels"):
        chat.image_prompt(0, 5)
