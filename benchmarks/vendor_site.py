"""Make a site of `asv publish` work without the internet: its scripts and styles beside it.

    python benchmarks/vendor_site.py HTML_DIR [--packages NODE_MODULES]

asv's page loads jQuery, flot, Bootstrap and three more from servers of others. The same releases
come as six npm packages; each file must have the hash below, or nothing is changed.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

#: npm packages, at the versions asv 0.6.6 asks for.
PACKAGES = (
    "jquery@3.3.1",
    "flot@0.8.3",
    "flot-orderbars@1.0.0",
    "stupid-table-plugin@1.1.3",
    "blueimp-md5@2.19.0",
    "bootstrap@3.1.1",
)


class VendorError(Exception):
    """The site stays as it is, online only; the text says why."""


@dataclass(frozen=True)
class File:
    """A file of an npm package that stands for one the page loads. sha256: of its bytes."""

    path: str
    sha256: str


#: Last part of the address in asv's page -> file below node_modules.
FILES = {
    "jquery-3.3.1.min.js": File(
        "jquery/dist/jquery.min.js",
        "160a426ff2894252cd7cebbdd6d6b7da8fcd319c65b70468f10b6690c45d02ef",
    ),
    "jquery.flot.min.js": File(
        "flot/jquery.flot.js",
        "b7b931f273c38b1277b9c6c1f4e05c4ec09885a487bddaf3279e2d7e49a38e12",
    ),
    "jquery.flot.time.min.js": File(
        "flot/jquery.flot.time.js",
        "a582c832adc7138a6b05aaf61f16ebac274701f1be4afea77e739a1c34b9c41a",
    ),
    "jquery.flot.selection.min.js": File(
        "flot/jquery.flot.selection.js",
        "e6c85f6c1ebe4b4da29d8ae238c7c5060283f05f7ef054f6b91817d02c092918",
    ),
    "jquery.flot.categories.min.js": File(
        "flot/jquery.flot.categories.js",
        "6e81664b28ea795c734906f4aa15614640a75ac7fbd399a7fb9084040698351a",
    ),
    "jquery.flot.orderBars.js": File(
        "flot-orderbars/js/jquery.flot.orderBars.js",
        "39735b4f46f96ff4e082572401f47c55a2767b366fd1d1e821e44a8d830a12bf",
    ),
    "stupidtable.min.js": File(
        "stupid-table-plugin/stupidtable.min.js",
        "4642380f28ebe9ed7cac251793b281ef8620c4386205d92788f9b12f5cceb4e0",
    ),
    "md5.min.js": File(
        "blueimp-md5/js/md5.min.js",
        "64d7ded388c562e4bde9e58ce205e5fa01b9734fcd434d496eb7b4fbfe9b927d",
    ),
    "bootstrap.min.js": File(
        "bootstrap/dist/js/bootstrap.min.js",
        "898d05a17f2cfc5120ddcdba47a885c378c0b466f30f0700e502757e24b403a1",
    ),
    "bootstrap.min.css": File(
        "bootstrap/dist/css/bootstrap.min.css",
        "e9503448692b738dd260fbd7f7cabf2e11f09b600fa97e6eb3a56eba5b1a7e9b",
    ),
}

_ADDRESS = re.compile(r'(<script src|<link rel="stylesheet" href)="(https?:[^"]+)"')
_ONLY_FOR_OTHERS = re.compile(r' (?:integrity|crossorigin|referrerpolicy)="[^"]*"')


def fetch(folder: Path) -> Path:
    """Install the packages with npm, without running any script of theirs; node_modules."""
    npm = shutil.which("npm")
    if npm is None:
        raise VendorError("there is no npm here")
    folder.mkdir(parents=True, exist_ok=True)
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-save")
    done = subprocess.run(
        [npm, "install", *options, "--prefix", str(folder), *PACKAGES],
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise VendorError(f"npm install failed: {lines[0]}")
    return folder / "node_modules"


def vendor(html: Path, packages: Path) -> list[str]:
    """Copy what the page loads to `vendor/` and point the page there; names of the files."""
    page = html / "index.html"
    text = page.read_text(encoding="utf-8")
    wanted = {address.rsplit("/", 1)[1]: address for _, address in _ADDRESS.findall(text)}
    unknown = sorted(set(wanted) - set(FILES))
    if unknown:
        raise VendorError(f"asv's page loads files that are not known here: {', '.join(unknown)}")
    contents = {name: _checked(packages, FILES[name]) for name in wanted}
    (html / "vendor").mkdir(exist_ok=True)
    for name, content in contents.items():
        (html / "vendor" / name).write_bytes(content)
    text = _ADDRESS.sub(lambda m: f'{m[1]}="vendor/{m[2].rsplit("/", 1)[1]}"', text)
    page.write_text(_ONLY_FOR_OTHERS.sub("", text), encoding="utf-8")
    return sorted(wanted)


def _checked(packages: Path, file: File) -> bytes:
    path = packages / file.path
    if not path.is_file():
        raise VendorError(f"{file.path} is not in the packages")
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != file.sha256:
        raise VendorError(f"{file.path} has SHA-256 {found}, not {file.sha256}")
    return content


def main() -> int:
    """Command line; 1 where the site stays online only."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("html", type=Path)
    parser.add_argument("--packages", type=Path, help="node_modules (default: npm fetches them)")
    arguments = parser.parse_args()
    try:
        packages = arguments.packages or fetch(arguments.html.parent / "npm")
        names = vendor(arguments.html, packages)
    except VendorError as error:
        print(f"the site needs the internet to show its graphs: {error}", file=sys.stderr)
        return 1
    print(f"{len(names)} files in {arguments.html / 'vendor'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
