"""Parts of ordinary JPEGs, decoded by libjpeg-turbo and resized by OpenCV, both with vector instructions.

An image is decoded at 1/8, 1/4, 1/2 or the whole of its size, down to the last row that is needed. libjpeg's scales in
between are no faster. Before OpenCV interpolates linearly, the part is smoothed, so that pixels are those of Pillow's
antialiased bilinear filter to .3 of 255 in the mean.

Ordinary are those of 8 bits with one or three components. Pillow reads all others, and says what is wrong
with damaged ones.
"""

import math
import struct
import threading
from typing import Any, NamedTuple

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

SEQUENTIAL, PROGRESSIVE, SCAN, FILL = (0xC0, 0xC1), 0xC2, 0xDA, 0xFF
ROWS = 16
"""The height of the blocks in which an image is decoded."""
CUT = "extraneous bytes before marker"
"""What libjpeg says of the data of rows that were left out."""
MOST_KEPT = 1 << 24
"""The most bytes of a buffer that a thread keeps for the next image."""
NARROW = 3.0
"""The most source pixels for a pixel of the result; beyond, the smoothing would be too short."""
# The ranks' readers are as many as there are processors, and a forked process has none of OpenCV's threads.
cv2.setNumThreads(0)


class Frame(NamedTuple):
    """What the header says of an image."""

    height_at: int
    """The place of the height's two bytes."""
    height: int
    width: int
    has_one_scan: bool
    """Whether rows come one after another; else all scans hold a part of each."""


class _Buffers(threading.local):
    """Memory that a thread uses for each image: fresh memory would take as long as the decoding of a small one."""

    def __init__(self) -> None:
        self._kept: dict[str, NDArray[np.uint8]] = {}

    def of_shape(self, name: str, height: int, width: int) -> NDArray[np.uint8]:
        size = height * width * 3
        buffer = self._kept.get(name)
        if buffer is None or len(buffer) < size:
            buffer = np.empty(size, np.uint8)
            if size <= MOST_KEPT:
                self._kept[name] = buffer
        return buffer[:size].reshape(height, width, 3)


_buffers = _Buffers()


def frame(encoded: bytes) -> Frame | None:
    """The image's frame; None where it is no ordinary JPEG, or damaged."""
    found, place = None, 2
    while encoded.startswith(b"\xff\xd8") and place + 9 < len(encoded) and encoded[place] == FILL:
        kind, length = encoded[place + 1], int.from_bytes(encoded[place + 2 : place + 4], "big")
        if kind in (*SEQUENTIAL, PROGRESSIVE):
            bits, height, width, components = struct.unpack_from(">BHHB", encoded, place + 4)
            if bits != 8 or components not in (1, 3) or not height or not width:
                return None
            found = Frame(place + 5, height, width, kind != PROGRESSIVE), components
        elif kind == SCAN:
            if found is None:
                return None
            header, components = found
            return header._replace(has_one_scan=header.has_one_scan and encoded[place + 4] == components)
        place += 1 if kind == FILL else 2 + length
    return None


def read(
    encoded: bytes, header: Frame, box: tuple[int, int, int, int], is_flipped: bool, out: NDArray[np.uint8]
) -> bool:
    """Resizes the box (left, upper, right, lower) of the image to `out`, uint8 [side, side, 3], maybe flipped.

    Returns False where the image has to be read by Pillow: it is damaged, or the box is very large.
    """
    side = len(out)
    eighths = next((n for n in (1, 2, 4) if min(box[2] - box[0], box[3] - box[1]) * n >= side * 8), 8)
    left, upper, right, lower = (edge * eighths / 8 for edge in box)
    across, down = (right - left) / side, (lower - upper) / side
    if max(across, down) > NARROW or (image := _decoded(encoded, header, eighths, box[3])) is None:
        return False
    x, y = int(left), int(upper)
    part: Any = image[y : math.ceil(lower), x : math.ceil(right)]
    if max(across, down) > 1:
        smooth = _buffers.of_shape("smooth", *part.shape[:2])
        border = cv2.BORDER_REPLICATE | cv2.BORDER_ISOLATED
        part = cv2.sepFilter2D(part, -1, _kernel(across), _kernel(down), smooth, borderType=border)
    if any(edge % 1 for edge in (left, upper, right, lower)):
        first = right - x - across / 2 - 0.5 if is_flipped else left - x + across / 2 - 0.5
        matrix = np.array([[-across if is_flipped else across, 0, first], [0, down, upper - y + down / 2 - 0.5]])
        flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
        cv2.warpAffine(part, matrix, (side, side), out, flags, cv2.BORDER_REPLICATE)
    elif is_flipped:
        unflipped = _buffers.of_shape("unflipped", side, side)
        cv2.flip(cv2.resize(part, (side, side), unflipped, interpolation=cv2.INTER_LINEAR), 1, out)
    else:
        cv2.resize(part, (side, side), out, interpolation=cv2.INTER_LINEAR)
    return True


def _decoded(encoded: bytes, header: Frame, eighths: int, lower: int) -> NDArray[np.uint8] | None:
    """The image at so many eighths of its size, at least down to the row `lower`; None where it is damaged."""
    # Of chroma at half the height, interpolation reads a row more.
    rows = min(header.height, -(-(lower + 2) // ROWS) * ROWS) if header.has_one_scan else header.height
    if rows < header.height:
        at = header.height_at
        encoded = b"".join((encoded[:at], rows.to_bytes(2, "big"), encoded[at + 2 :]))
    height, width = -(-rows * eighths // 8), -(-header.width * eighths // 8)
    pixels = _buffers.of_shape("pixels", height, width)
    try:
        simplejpeg.decode_jpeg(encoded, "RGB", min_height=height, min_width=width, buffer=pixels)
    except ValueError as error:
        if rows == header.height or CUT not in str(error):
            return None
    return pixels


def _kernel(ratio: float) -> NDArray[np.float32]:
    """The smoothing after which a linear interpolation of every `ratio`-th pixel is that of a triangle as wide: exact
    for 1, 2 and 3, and of the same variance, (ratio² - 1) / 6, between them."""
    variance = max(0.0, (ratio * ratio - 1) / 6)
    if ratio <= 2:
        return np.array([variance / 2, 1 - variance, variance / 2], np.float32)
    part: Any = (variance - 1 / 2) / (4 / 3 - 1 / 2)
    return ((1 - part) * np.array([0, 1, 2, 1, 0]) / 4 + part * np.array([1, 2, 3, 2, 1]) / 9).astype(np.float32)
