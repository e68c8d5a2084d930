"""Images in the web page: pasted, dropped and chosen, shown, sent, made smaller, kept with a chat."""

import json

import pytest
from image_files import uri
from pages import LAST, log_in, said
from test_stored_keys import bearer
from test_stored_responses import keys, path  # noqa: F401

SHOWN = "[...document.querySelectorAll('.composer .images img')].map(image => image.src)"
SENT = "JSON.parse((sessionStorage.getItem('zse.request')))"
# Files of the browser's own making: a canvas of one colour, and what is none.
MADE = """async (width, height, type) => {
    const canvas = document.createElement('canvas');
    [canvas.width, canvas.height] = [width, height];
    const place = canvas.getContext('2d');
    place.fillStyle = '#f00';
    place.fillRect(0, 0, width, height);
    return new File([await new Promise((done) => canvas.toBlob(done, type))], 'a', { type });
}"""


def give(tab, files: str, event: str = "paste") -> None:
    """files: an expression of JavaScript, a list; of an event of the page's question, or of its choice."""
    data = "clipboardData" if event == "paste" else "dataTransfer"
    kind = "ClipboardEvent" if event == "paste" else "DragEvent"
    tab.evaluate(
        f"""(async () => {{
        const made = {MADE}, data = new DataTransfer();
        for (const file of await Promise.all({files})) data.items.add(file);
        if ({json.dumps(event)} === 'choose') {{
            const input = document.querySelector('.composer [type=file]');
            input.files = data.files;
            return input.dispatchEvent(new Event('change', {{ bubbles: true }}));
        }}
        const told = new {kind}({json.dumps(event)}, {{ {data}: data, bubbles: true, cancelable: true }});
        document.querySelector('#question').dispatchEvent(told);
    }})()"""
    )


@pytest.fixture
def server(own_server, path, keys):  # noqa: F811
    return own_server("--vision area", database=path)


@pytest.fixture
def tab(chromium, server, keys):  # noqa: F811
    """A reader with a key."""
    chromium.errors.clear()
    chromium.open(server.base + "/version")
    chromium.forget(server.base)
    log_in(chromium, server, keys[0])
    chromium.wait("document.querySelector('#question')")
    yield chromium
    assert not chromium.errors
    chromium.send("Page.navigate", url="about:blank")


def test_images_of_a_question(tab, server, keys):  # noqa: F811
    give(tab, "[made(60, 60, 'image/png')]")
    tab.wait(f"{SHOWN}.length === 1")
    give(tab, "[made(4000, 2000, 'image/webp'), made(30, 30, 'image/png')]", "drop")
    tab.wait(f"{SHOWN}.length === 3")
    found = tab.evaluate(SHOWN)
    assert [address.partition(";")[0] for address in found] == ["data:image/png", "data:image/jpeg", "data:image/png"]
    size = tab.evaluate(
        "(({naturalWidth: w, naturalHeight: h}) => [w, h])(document.querySelectorAll('.images img')[1])"
    )
    assert size == [1536, 768]
    tab.evaluate("document.querySelectorAll('.composer .images button')[2].click()")
    tab.wait(f"{SHOWN}.length === 2")
    give(tab, "[new File(['words'], 'b.png', {type: 'image/png'})]", "choose")
    tab.wait("document.querySelector('.notice')?.innerText.includes('b.png is no image')")
    tab.evaluate("document.querySelector('#question').focus()")
    tab.type("!images")
    tab.press("Enter")
    tab.wait(f"{LAST}?.ariaBusy === 'false'")
    told = said(tab)
    assert told.startswith("5+4 56x56 ff0000; 9+") and told.count(";") == 1 and tab.evaluate(SHOWN) == []
    assert tab.evaluate("document.querySelectorAll('.message.user .images img').length") == 2
    content = tab.evaluate(SENT)["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "image_url", "text"]

    # Kept with the chat, and there again.
    tab.wait("document.querySelectorAll('.drawer.left .title').length === 1")
    card = server.get("/v1/chats", bearer(keys[0])).json["data"][0]
    kept = server.get(f"/v1/chats/{card['id']}", bearer(keys[0])).json["messages"]
    assert [part["image_url"]["url"] for part in content[:2]] == kept[1]["images"]
    tab.send("Page.reload")
    tab.wait("document.querySelectorAll('.message.user .images img').length === 2")


def test_an_image_alone_is_a_question(tab):
    give(tab, "[made(60, 60, 'image/png')]")
    tab.wait(f"{SHOWN}.length === 1")
    tab.evaluate("document.querySelector('.composer .primary').click()")
    tab.wait(f"{LAST}?.ariaBusy === 'false'")
    assert [part["type"] for part in tab.evaluate(SENT)["messages"][0]["content"]] == ["image_url"]
    tab.wait("document.querySelector('.drawer.left .title')?.innerText === 'Image'")


def test_a_kept_chat_asks_no_other_place(server, keys):  # noqa: F811
    """What is no data URI is not kept."""
    me, root = bearer(keys[0]), {"parent": -1, "role": "root"}
    for address, status in ((uri(), 200), ("https://example.com/a.png", 400), ("data:text/html;base64,aGk=", 400)):
        messages = [root, {"parent": 0, "role": "user", "images": [address]}]
        assert server.post("/v1/chats/c1" + str(status), {"version": 0, "messages": messages}, me).status == status
