"""LoRA adapters in the web page, over a real engine of a tiny model."""

import os
from pathlib import Path

from pages import LAST, ask, press_in, row
from test_adapters_served import Server, folders  # noqa: F401


def test_an_adapter_is_loaded_chosen_and_unloaded(chromium, folders):  # noqa: F811
    server = Server(str(folders["base"]), "--model-name", "tiny", "--adapter-slots", "2")
    chromium.errors.clear()
    try:
        chromium.window()
        chromium.open(server.address + "/#models")
        chromium.wait("document.querySelector('[name=path]')")
        for name, text in (("name", "one"), ("path", str(folders[1]))):
            chromium.evaluate(f"document.querySelector('form[aria-label=\"Load an adapter\"] [name={name}]').focus()")
            chromium.type(text)
        chromium.press("Enter")
        chromium.wait(f"{row('tiny:one')}?.innerText.includes('loaded')")
        assert chromium.evaluate(f"{row('tiny:one')}.innerText").split()[2:5] == [
            "4",
            "down,",
            "gate,",
        ]  # rank, modules
        if folder := os.environ.get("ZSE_TEST_SCREENSHOTS"):
            chromium.screenshot(Path(folder, "adapters-wide.png"))
        chromium.evaluate("location.hash = 'chat'")
        chromium.wait("document.querySelector('[name=model]')?.options.length === 2")
        chromium.evaluate(
            "(e => { e.value = 'tiny:one'; e.dispatchEvent(new Event('change', {bubbles: true})) })(document.querySelector('[name=model]'))"
        )
        ask(chromium, "hello")
        assert chromium.evaluate(f"{LAST}.querySelector('header').innerText") == "tiny:one"
        assert not chromium.evaluate(f"{LAST}.querySelector('.error')?.innerText ?? ''")
        chromium.evaluate("location.hash = 'models'")
        press_in(chromium, row("tiny:one"), "Unload")
        press_in(chromium, row("tiny:one"), "Unload, really")
        chromium.wait("document.querySelector('section:last-of-type').innerText.includes('No adapter is loaded')")
        status, listed = server.call("/admin/adapters")
        assert status == 200 and listed["data"] == [] and not chromium.errors
    finally:
        chromium.send("Page.navigate", url="about:blank")
        server.close()
