"""Where images of a prompt stand, as the cache and a step need to know (options.PlacedImage); their embeddings are
engine/images.py's."""

from array import array

from zse.scheduler.options import PlacedImage


def compared(tokens: array, images: tuple[PlacedImage, ...]) -> array:
    """The tokens (i32) as prefixes are compared by: those of images replaced by what they show."""
    found = tokens[:]
    for image in images:
        found[image.start : image.end] = array("i", image.numbers)[: max(0, len(tokens) - image.start)]
    return found


def uncut(images: tuple[PlacedImage, ...], length: int) -> int:
    """`length` tokens, or fewer where the last of them would be within an image that one step computes."""
    return next((image.start for image in images if image.whole and image.start < length < image.end), length)


def turned_by(images: tuple[PlacedImage, ...], start: int, end: int) -> tuple[array, array, array]:
    """Positions (time, height, width) of tokens start .. end - 1 of a prompt with images that have grids, i32 each. A
    token of text has its place; those of an image of r rows and c columns stand at one time, and the text behind goes
    on max(r, c) further (M-RoPE, arXiv 2409.12191)."""
    lines = array("i"), array("i"), array("i")
    at, shift = start, 0
    for image in images:
        if at < min(image.start, end):
            for line in lines:
                line.extend(range(at + shift, min(image.start, end) + shift))
            at = min(image.start, end)
        if image.start <= at < min(image.end, end):
            first, columns = image.start + shift, image.grid[1]
            places = range(at - image.start, min(image.end, end) - image.start)
            lines[0].extend([first] * len(places))
            lines[1].extend([first + place // columns for place in places])
            lines[2].extend([first + place % columns for place in places])
            at = min(image.end, end)
        shift += max(image.grid) - image.count
    for line in lines:
        line.extend(range(at + shift, end + shift))
    return lines
