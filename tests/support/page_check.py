"""Shows a report in Chromium, and checks it: `python tests/support/page_check.py REPORT.html FOLDER`.

Writes screenshots at 390 and 1280 px, light and dark, and a PDF on A4 (its pages as PNG) to FOLDER. Prints the size,
and whether the page holds `http`, scrolls sideways, or breaks a rule of axe-core: then with exit code 1.

Needs Chromium, pdftoppm (Debian: chromium, poppler-utils) and Node.js with the packages puppeteer-core and axe-core,
in a folder that NODE_PATH names: `npm install puppeteer-core axe-core` there. CHROMIUM: another path of the browser.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

LIMIT = 1 << 20
SCRIPT = """
const [page, folder, browser] = process.argv.slice(1);
const puppeteer = require("puppeteer-core"), axe = require("axe-core");
(async () => {
  const chromium = await puppeteer.launch({executablePath: browser, args: ["--no-sandbox"]});
  const found = [];
  for (const width of [390, 1280]) for (const scheme of ["light", "dark"]) {
    const tab = await chromium.newPage();
    tab.on("request", request => request.url().match(/^(file|data):/) || found.push("requests " + request.url()));
    await tab.setViewport({width, height: 900, deviceScaleFactor: width < 500 ? 2 : 1});
    await tab.emulateMediaFeatures([{name: "prefers-color-scheme", value: scheme}]);
    await tab.goto("file://" + page);
    const wide = await tab.evaluate("document.documentElement.scrollWidth");
    if (wide > width) found.push(`${width} ${scheme}: scrolls sideways, ${wide} px`);
    await tab.screenshot({path: `${folder}/${width}-${scheme}.png`, fullPage: true});
    await tab.evaluate(axe.source);
    const {violations} = await tab.evaluate("axe.run()");
    for (const each of violations) for (const node of each.nodes)
      found.push(`${width} ${scheme}: ${each.id} (${each.impact}): ${node.target} ${node.failureSummary}`);
    if (scheme == "dark" && width == 1280) await tab.pdf({path: folder + "/page.pdf", preferCSSPageSize: true});
  }
  await chromium.close();
  console.log(JSON.stringify(found));
})();
"""


def looked_at(page: Path, folder: Path) -> list[str]:
    """The problems of the page. Screenshots are written into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    browser = os.environ.get("CHROMIUM") or shutil.which("chromium") or "chromium"
    command = ["node", "-e", SCRIPT, str(page.resolve()), str(folder.resolve()), browser]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    for old in folder.glob("page-*.png"):
        old.unlink()
    subprocess.run(["pdftoppm", "-r", "70", "-png", folder / "page.pdf", folder / "page"], check=True)
    text = page.read_text()
    print(f"{len(text.encode()):,} bytes")
    if len(text.encode()) > LIMIT:
        found.append(f"more than {LIMIT:,} bytes")
    if "http" in text or "<script" in text:
        found.append("http or <script stands in it")
    return found


if __name__ == "__main__":
    problems = looked_at(Path(sys.argv[1]), Path(sys.argv[2]))
    print("\n".join(problems) or "nothing wrong")
    sys.exit(bool(problems))
