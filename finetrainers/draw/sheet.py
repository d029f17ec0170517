"""Sheets of text and images, which grow downwards."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from PIL import Image, ImageDraw, ImageFont

Color = tuple[int, int, int]


@dataclass(frozen=True)
class Letters:
    """Letters of one size, in pixels, and color."""

    size: int
    ink: Color

    @cached_property
    def font(self) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
        """PIL's font of this size."""
        return ImageFont.load_default(size=self.size)

    def length(self, text: str) -> int:
        """Return the width of a line of text, in pixels."""
        return round(self.font.getlength(text))

    def wrap(self, text: str, width: int) -> list[str]:
        """Wrap text to a width; a word that is too long is not broken."""
        lines = [""]
        for word in text.split():
            longer = f"{lines[-1]} {word}".strip()
            if lines[-1] and self.length(longer) > width:
                lines.append(word)
            else:
                lines[-1] = longer
        return lines


class Sheet:
    """An image that grows downwards: its content is buffered until its height is known.

    Attributes:
        top: where the next text or image begins.
        lines: lines of text, each with its left and upper end.
        images: each with its left and upper end.
    """

    def __init__(self, width: int, *, margin: int, line_height: float) -> None:
        """Args:
        width: of the image.
        margin: on all sides.
        line_height: distance between lines, in sizes of their letters.
        """
        self.width, self.margin, self.line_height = width, margin, line_height
        self.top = margin
        self.lines: list[tuple[str, int, int, Letters]] = []
        self.images: list[tuple[Image.Image, int, int]] = []

    def write(self, text: str, left: int, letters: Letters, *, below: int = 0) -> None:
        """Add a line of text, `below` pixels under the top, without advancing."""
        self.lines.append((text, left, self.top + below, letters))

    def advance(self, letters: Letters) -> None:
        """Move the top below a line of these letters."""
        self.top += round(self.line_height * letters.size)

    def paragraph(self, text: str, letters: Letters) -> None:
        """Add text in as many lines as it needs."""
        for line in letters.wrap(text, self.width - 2 * self.margin):
            self.write(line, self.margin, letters)
            self.advance(letters)

    def place(self, image: Image.Image, left: int) -> None:
        """Add an image, without advancing."""
        self.images.append((image, left, self.top))

    def draw(self, paper: Color, *, outline: Color | None = None) -> Image.Image:
        """Return the finished image, whose images have an outline of this color, if any."""
        sheet = Image.new("RGB", (self.width, self.top + self.margin), paper)
        draw = ImageDraw.Draw(sheet)
        for image, left, top in self.images:
            sheet.paste(image, (left, top))
            if outline is not None:
                draw.rectangle((left - 1, top - 1, left + image.width, top + image.height), outline=outline)
        for text, left, top, letters in self.lines:
            draw.text((left, top), text, fill=letters.ink, font=letters.font)
        return sheet
