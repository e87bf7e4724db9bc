"""Scikit-learn's bundled handwritten digits as a classifier's data: an image is a row of 64 tokens, its gray levels.

1,797 images of 8 x 8 pixels, row after row from the top left, each a whole number from 0 (white) to 16 (black), with
the digit they show. They come with scikit-learn (the extra `vision`), so nothing is downloaded. Held out is, class by
class, the fifth of the images whose sha256 comes first: the same on every machine and in every order.

Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI (the test set of 1998).
"""

import dataclasses
import hashlib
import importlib

import numpy as np

from jaxblock.training.labelled import LabelledCorpus, LabelledExamples, make_corpus

NAME = "digits"
"""The data.path that stands for these images; a file of that name is "./digits"."""
SIDE, LEVELS = 8, 17
HELD_OUT = 0.2
SHADES = " .:-=+*#%@"


def load_digits(*, context: int) -> LabelledCorpus:
    """Load the images.

    Raises:
      ValueError: scikit-learn is not installed; a context that is not the 64 pixels of an image.
    """
    if context != SIDE * SIDE:
        raise ValueError(
            f"model.context is {context} and data.path is {NAME!r}; an image is {SIDE * SIDE} tokens, its pixels, so "
            f"the context must be {SIDE * SIDE}"
        )
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ValueError(
            f"data.path is {NAME!r}, which are images that come with scikit-learn; install it with "
            "pip install 'jaxblock[vision]'"
        ) from error
    pixels_EP, labels_E = datasets.load_digits(return_X_y=True)
    images = [image_P.tobytes() for image_P in np.asarray(pixels_EP, np.uint8)]
    names = tuple(str(digit) for digit in range(10))
    found = make_corpus(
        LabelledExamples.of(images, np.asarray(labels_E).tolist(), names),
        [hashlib.sha256(image).hexdigest() for image in images],
        context=context,
        source="scikit-learn's bundled digits",
        notes=[],
        part=HELD_OUT,
    )
    words = f"scikit-learn's bundled digits: {len(images):,} images of {SIDE} x {SIDE} pixels, {len(names)} classes"
    return dataclasses.replace(found, source=words, show=draw_image)


def draw_image(pixels_P: np.ndarray) -> str:
    """Return an image as lines of characters, two a pixel, the darker the fuller."""
    shades = (pixels_P.reshape(SIDE, SIDE).astype(int) * (len(SHADES) - 1) + LEVELS // 2) // (LEVELS - 1)
    return "\n".join("".join(2 * SHADES[shade] for shade in row).rstrip() for row in shades)
