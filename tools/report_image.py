"""Make the pictures of `longtail demo`: docs/report.png, the upper part of its report in headless Chromium, and docs/demo.png.

Usage: python tools/report_image.py [RUNS]

RUNS is the folder of a finished demo (default: runs/demo). No dataset photographs may be in the picture: digits are fine.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageOps

import longtail

DOCS = Path(__file__).resolve().parents[1] / "docs"
OUT = DOCS / "report.png"  # in the README
SIZE = (1280, 1408)  # pixels
MAX_BYTES, COLORS, BORDER = 400 * 1024, 256, "#c8cad6"


def main() -> None:
    """Run the script with the arguments of the command line."""
    runs = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/demo")
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("no Chromium: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = longtail.report(runs, Path(folder, "report.html"))
        flags = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        command = [browser, *flags, f"--window-size={SIZE[0]},{SIZE[1]}", f"--screenshot={folder}/page.png"]
        subprocess.run([*command, page.resolve().as_uri()], check=True, capture_output=True, timeout=120)
        picture = ImageOps.expand(Image.open(f"{folder}/page.png").convert("RGB"), border=1, fill=BORDER)
        picture.quantize(COLORS, dither=Image.Dither.NONE).save(OUT, optimize=True)
    if OUT.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{OUT} has {OUT.stat().st_size:,} bytes, more than {MAX_BYTES:,}")
    shutil.copyfile(runs / "accuracy.png", DOCS / "demo.png")  # in results/README.md
    print(f"wrote {OUT}: {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
