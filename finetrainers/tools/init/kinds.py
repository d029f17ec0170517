"""Kinds of LoRAs: what each needs from clips and captions, for the comments of a new configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoRAKind:
    """A kind of LoRA.

    Attributes:
        about: description.
        trigger_word: default trigger word, or an empty text if there is none.
        captions: advice on captions.
        advice: further advice on clips and settings.
        needs_motion: whether images cannot teach it.
    """

    about: str
    trigger_word: str
    captions: str
    advice: str = ""
    needs_motion: bool = False


KINDS = {
    "character": LoRAKind(
        "one person, animal or object",
        "MYCHARACTER",
        "Describe everything but the looks of the character, which the trigger word stands for (common advice, "
        "untested here).",
        "Vary background, light, distance and angle. Images teach looks; how the character moves needs clips.",
    ),
    "style": LoRAKind(
        "a look of everything in the video",
        "MYSTYLE",
        "Describe the content and leave out the style, which the trigger word stands for (common advice, untested "
        "here).",
        "Vary the content as much as possible: what all clips share is learned with the style.",
    ),
    "motion": LoRAKind(
        "a movement, a camera move or an effect",
        "MYMOTION",
        "Describe the content; name the motion by the trigger word.",
        "Images teach no motion. If memory is short, use more frames of a smaller size (`resolutions`, "
        "`frame_buckets`).",
        needs_motion=True,
    ),
    "general": LoRAKind(
        "new content without a trigger word",
        "",
        "Write them as you will prompt: subject, action, surroundings, camera, light.",
    ),
}
