"""LoRA adapters in the web page, over a real engine of a tiny model."""

import os
from pathlib import Path

from pages import LAST, ask, log_in, press_in, row
from test_adapters_served import Server, folders  # noqa: F401
from test_page_chats import shoot

UPLOAD = "document.querySelector('form[aria-label=\"Upload an adapter\"]')"


def test_an_adapter_is_uploaded(chromium, own_server, folders, tmp_path, monkeypatch):  # noqa: F811
    """With a name first that is refused."""
    monkeypatch.setenv("ZSE_HOME", str(tmp_path))
    server = own_server(key="admin-key")
    chromium.errors.clear()
    chromium.open(server.base + "/version")
    chromium.forget(server.base)
    log_in(chromium, server, "admin-key")
    chromium.evaluate("location.hash = 'models'")

    def press(within: str, label: str) -> None:
        chromium.wait(f"{UPLOAD}.querySelector('button').disabled === false")  # nothing is under way
        press_in(chromium, within, label)

    chromium.wait(UPLOAD)
    for name, file in (("config", "adapter_config.json"), ("weights", "adapter_model.safetensors")):
        chromium.choose(f"form[aria-label='Upload an adapter'] [name={name}]", folders[1] / file)
    for name in ("taken", "mine"):
        chromium.evaluate(
            f"{UPLOAD}.querySelector('[name=name]').focus(); {UPLOAD}.querySelector('[name=name]').select()"
        )
        chromium.type(name)
        if name == "taken":
            server.post("/admin/adapters", {"name": "taken", "path": "/x"}, {"authorization": "Bearer admin-key"})
        press(UPLOAD, "Upload")
        if name == "taken":
            chromium.wait("document.querySelector('.error')?.innerText.includes('There is an adapter')")
    chromium.wait(f"{row('fake:mine')}?.innerText.includes('uploaded')")
    assert chromium.evaluate(f"{UPLOAD}.querySelector('[name=weights]').files.length") == 0  # ready for the next
    shoot(chromium, "adapters")
    press(row("fake:mine"), "Unload")
    press(row("fake:mine"), "Unload, really")
    chromium.wait(f"{row('fake:mine')}?.innerText.includes('stored')")
    press(row("fake:mine"), "Load")
    chromium.wait(f"{row('fake:mine')}?.innerText.includes('loaded')")
    press(row("fake:mine"), "Delete")
    press(row("fake:mine"), "Delete, really")
    chromium.wait(f"!{row('fake:mine')}")
    assert not list((tmp_path / "adapters").glob("?" * 64)) and not chromium.errors
    chromium.send("Page.navigate", url="about:blank")


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
