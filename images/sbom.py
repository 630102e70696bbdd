"""What is in an image, as a CycloneDX 1.5 document: Debian's packages and Python's distributions.

Called by `images.build`, which gives the layer; reads what dpkg and pip left in it.
"""

from __future__ import annotations

import re
import tarfile
from email.parser import HeaderParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

STATUS = "var/lib/dpkg/status"
# A variant of Debian's images keeps one file for each package.
_STATUS_FOLDER = "var/lib/dpkg/status.d/"
_DISTRIBUTION = re.compile(r"[^/]+\.dist-info/METADATA|[^/]+\.egg-info/PKG-INFO")
Component = dict[str, Any]


def document(layer: Path, name: str, image_version: str) -> dict[str, Any]:
    """The bill of materials of one layer, the same for the same layer.

    Args:
        layer: The whole root, a tar file that is not compressed.
        name: The image's name.
        image_version: What tells two contents of one name apart: the layer's digest.
    """
    components = _components(layer)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "bom-ref": f"image:{name}",
                "name": f"hutch-{name}",
                "version": image_version,
            }
        },
        "components": components,
    }


def _components(layer: Path) -> list[Component]:
    found: dict[str, Component] = {}
    with tarfile.open(layer, "r:") as archive:
        for member in archive:
            if not member.isreg():
                continue
            parent, _, last = member.name.rpartition("/")
            inner = f"{parent.rpartition('/')[2]}/{last}"
            if member.name == STATUS or member.name.startswith(_STATUS_FOLDER):
                made = _packages(_text(archive, member))
            elif _DISTRIBUTION.fullmatch(inner):
                made = [_distribution(_text(archive, member))]
            else:
                continue
            for component in made:
                found[component["bom-ref"]] = component
    return [found[reference] for reference in sorted(found)]


def _text(archive: tarfile.TarFile, member: tarfile.TarInfo) -> str:
    file = archive.extractfile(member)
    return file.read().decode("utf-8", "replace") if file is not None else ""


def _packages(status: str) -> list[Component]:
    made: list[Component] = []
    for paragraph in status.split("\n\n"):
        fields = HeaderParser().parsestr(paragraph)
        if not str(fields.get("Status", "install ok installed")).endswith(" installed"):
            continue
        name, version = fields.get("Package"), fields.get("Version")
        if not name or not version:
            continue
        architecture = fields.get("Architecture", "all")
        purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe='')}?arch={architecture}"
        component: Component = {
            "type": "library",
            "bom-ref": purl,
            "name": name,
            "version": version,
            "purl": purl,
        }
        if maintainer := fields.get("Maintainer"):
            component["publisher"] = str(maintainer)
        made.append(component)
    return made


def _distribution(metadata: str) -> Component:
    fields = HeaderParser().parsestr(metadata)
    name, version = str(fields["Name"]), str(fields["Version"])
    normal = re.sub(r"[-_.]+", "-", name).lower()
    purl = f"pkg:pypi/{normal}@{quote(version, safe='')}"
    component: Component = {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "purl": purl,
    }
    expression = fields.get("License-Expression")
    if expression:
        component["licenses"] = [{"expression": expression}]
    return component
