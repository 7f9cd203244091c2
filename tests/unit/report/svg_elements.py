"""Elements of an SVG picture, by tag or by CSS class."""

from __future__ import annotations

import xml.etree.ElementTree as ET

LABELS = {"title": "t", "x_label": "x", "y_label": "y"}


def elements(picture: str, name: str) -> list[ET.Element]:
    return ET.fromstring(picture).findall(f".//{name}")


def with_class(picture: str, style: str) -> list[ET.Element]:
    return [item for item in ET.fromstring(picture).iter() if style in item.get("class", "").split()]
