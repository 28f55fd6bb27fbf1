"""The chat page in a headless Chromium, where playwright and a chromium are there: it talks, and nothing overlaps."""

import itertools

import pytest

pytestmark = pytest.mark.slow(seconds=5)
WIDTHS = (1280, 390)
BOXES = "h1, #state, #talk, #words, #options label, #options button"


def answered(page, num):
    """Wait for so many answers. The page's policy forbids what playwright would evaluate there."""
    page.locator(".assistant .token").first.wait_for()
    page.locator("#send:not([disabled])").wait_for()
    assert page.locator(".assistant").count() == num


@pytest.mark.parametrize("width", WIDTHS)
def test_a_talk_on_the_page(scripted, browser, width, tmp_path):
    page = browser.new_page(viewport={"width": width, "height": 800})
    faults = []
    page.on(
        "console", lambda message: faults.append(message.text) if message.type == "error" else None
    )
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(scripted.url)
    page.locator("#state", has_text="version 0").wait_for()
    scripted.say("Hello <b>you</b>, a long answer " + "that goes on and on " * 8)
    page.fill("#tokens", "200")
    page.fill("#words", "hi")
    page.press("#words", "Enter")
    answered(page, 1)
    said = page.text_content(".assistant")
    assert (
        said.startswith("Hello <b>you</b>, a long answer")
        and page.query_selector(".assistant b") is None
    )
    page.hover(".assistant .token >> nth=3")
    assert page.is_visible("#tip")
    tip = page.text_content("#tip")
    assert "log-prob" in tip and "version  0" in tip
    page.screenshot(path=tmp_path / f"page_{width}.png")
    page.mouse.move(0, 0)
    # A second turn has the first in its context.
    scripted.say("again")
    page.fill("#words", "more")
    page.click("#send")
    answered(page, 2)
    context = scripted.api.served.renderer.tokenizer.decode(scripted.sampler.requests[-1].tokens)
    assert "hi<|end|><|assistant|>Hello" in context
    boxes = [box.bounding_box() for box in page.query_selector_all(BOXES)]
    for a, b in itertools.combinations(boxes, 2):
        apart = a["x"] + a["width"] <= b["x"] + 0.5 or b["x"] + b["width"] <= a["x"] + 0.5
        apart |= a["y"] + a["height"] <= b["y"] + 0.5 or b["y"] + b["height"] <= a["y"] + 0.5
        assert apart, (a, b)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert all(box["x"] >= 0 and box["x"] + box["width"] <= width for box in boxes)
    assert faults == []
    page.close()
