"""Draw the screenshots of docs/see.md: the studio in Chromium, on a desk and on a phone, in both themes.

python docs/figures/studio.py [FOLDER]
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

SIZES = {"desk": (1280, 800), "phone": (390, 844)}
EXAMPLE = ["16x32", "--fail", "4x2@6,8", "--fail", "2x2@12,22", "--payload", "1GB", "--hardware", "tpu-v6e"]
COLOURS = 255


def main(folder: Path) -> None:
    with subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "meshmend", "lab", "studio", *EXAMPLE, "--listen", "127.0.0.1:0", "--json"],
        stdout=subprocess.PIPE,
        text=True,
    ) as studio:
        try:
            assert studio.stdout is not None  # noqa: S101
            lines = [studio.stdout.readline() for _ in range(5)]
            take(json.loads("".join(lines))["url"], folder)
        finally:
            studio.terminate()


def take(url: str, folder: Path) -> None:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb"):
        options.add_argument(flag)
    with webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver"))) as browser:
        browser.get(url)
        while not browser.find_element(By.TAG_NAME, "body").get_attribute("data-compared"):
            time.sleep(0.2)
        for size, (width, height) in SIZES.items():
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == "phone"}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            for theme in ("light", "dark"):
                scheme = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
                browser.execute_cdp_cmd("Emulation.setEmulatedMedia", scheme)
                time.sleep(1)  # until it is laid out anew
                picture = Image.open(io.BytesIO(browser.get_screenshot_as_png())).convert("RGB")
                path = folder / f"studio-{size}-{theme}.png"
                picture.quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
