# SPDX-License-Identifier: Apache-2.0
"""The OCR example: its steps one by one, whole pictures without a server, and the server itself."""

import importlib.util
import math
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.waiting import PATIENCE_S

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "ocr"
PICTURES = EXAMPLE / "pictures"
NAMES = ("label", "notice", "receipt")

cv2 = pytest.importorskip("cv2")
np = pytest.importorskip("numpy")
pytest.importorskip("onnxruntime")
if importlib.util.find_spec("rapidocr_onnxruntime") is None:  # never imported: it only holds the models
    pytest.skip("the wheel with the models is missing", allow_module_level=True)


def load_script(path, name):
    """Imports a file of the example, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


vision = load_script(EXAMPLE / "vision.py", "vision")
demo = load_script(EXAMPLE / "demo.py", "example_ocr_demo")
make = load_script(PICTURES / "make.py", "example_ocr_make")


def encoded(picture, extension=".jpg"):
    return cv2.imencode(extension, picture)[1].tobytes()


def rectangle(centre, sides, degrees):
    """Corners clockwise from where a text of this angle would start."""
    turn = np.array([(math.cos(math.radians(degrees)), math.sin(math.radians(degrees)))], np.float32)
    along, across = turn * sides[0] / 2, turn[:, ::-1] * (-1, 1) * sides[1] / 2
    return np.concatenate([-along - across, along - across, along + across, -along + across]) + centre


# ---------------------------------------------------------------------------------------------------------------------
# Pictures


class TestDecoding:
    @pytest.mark.parametrize("extension", [".jpg", ".png"])
    def test_the_size_is_known_before_anything_is_unpacked(self, extension):
        assert vision.picture_size(encoded(np.zeros((30, 70, 3), np.uint8), extension)) == (70, 30)

    @given(st.binary(max_size=200), st.sampled_from([b"", b"\xff\xd8", b"\xff\xd8\xff\xe0\0\0", b"\x89PNG\r\n\x1a\n"]))
    def test_bytes_that_are_no_picture_are_refused(self, content, start):
        with pytest.raises(ValueError):
            vision.decoded(start + content, 1000)

    def test_a_picture_with_too_many_pixels_is_refused_unopened(self):
        content = encoded(np.zeros((400, 500, 3), np.uint8), ".png")
        with pytest.raises(ValueError, match="500 x 400 pixels, 100000 are taken"):
            vision.decoded(content, 100_000)
        assert vision.decoded(content, 200_000).shape == (400, 500, 3)

    def test_a_picture_that_was_cut_off_is_refused_or_readable(self):
        content = encoded(np.zeros((40, 40, 3), np.uint8), ".png")
        with pytest.raises(ValueError, match="cut off"):
            vision.decoded(content[:40], 10_000)


# ---------------------------------------------------------------------------------------------------------------------
# Finding lines


class TestBoxes:
    @pytest.mark.parametrize("degrees", [-80, -45, -10, 0, 7, 30, 89])
    def test_a_blob_becomes_the_line_it_was_shrunk_from(self, degrees):
        heat = np.zeros((300, 400), np.float32)
        cv2.fillPoly(heat, [np.round(rectangle((200, 150), (160, 20), degrees)).astype(np.int32)], 0.9)
        (box,) = vision.boxes_of(heat, (800, 600))
        grow = 2 * 1.6 * 160 * 20 / (2 * (160 + 20))
        expected = 2 * rectangle((200, 150), (160 + grow, 20 + grow), degrees)
        assert np.abs(box.quad - expected).max() < 12
        assert box.score == pytest.approx(0.9, abs=0.1)

    def test_specks_and_faint_blobs_are_no_text(self):
        heat = np.zeros((100, 100), np.float32)
        heat[10:11, 10:12] = 1.0
        heat[50:70, 20:80] = 0.4
        assert vision.boxes_of(heat, (100, 100)) == []

    def test_an_empty_map_has_no_boxes(self):
        assert vision.boxes_of(np.zeros((64, 64), np.float32), (64, 64)) == []

    @given(st.floats(-85, 85), st.integers(0, 3), st.tuples(st.floats(2, 20), st.floats(10, 40)), st.floats(100, 500))
    def test_whatever_corner_comes_first_the_reading_starts_at_the_left(self, degrees, first, shape, centre):
        quad = rectangle((centre, centre), (shape[0] * shape[1], shape[1]), degrees)
        assert np.allclose(vision.from_reading_start(np.roll(quad, first, axis=0)), quad, atol=1e-2)

    def test_a_short_word_that_is_higher_than_wide_stands(self):
        quad = rectangle((50, 50), (20, 26), 0)
        assert np.allclose(vision.from_reading_start(np.roll(quad, 1, axis=0)), quad)

    def test_a_line_is_cut_out_level(self):
        picture = np.zeros((200, 200, 3), np.uint8)
        quad = rectangle((100, 100), (120, 24), 30)
        cv2.fillPoly(picture, [np.round(quad).astype(np.int32)], (255, 255, 255))
        line = vision.straightened(picture, quad.astype(np.float32))
        assert line.shape == (24, 120, 3)
        assert line[2:-2, 2:-2].min() > 200

    @pytest.mark.parametrize("shape", [(10, 10, 3), (1000, 20, 3), (900, 2000, 3), (64, 96, 3)])
    def test_the_detector_gets_sides_that_it_can_halve_five_times(self, shape):
        array = vision.detector_input(np.zeros(shape, np.uint8), 960)
        assert array.dtype == np.float32
        assert all(side % 32 == 0 and 32 <= side <= 960 for side in array.shape[2:])
        assert array.min() == array.max() == -1


# ---------------------------------------------------------------------------------------------------------------------
# Reading lines


def steps_of(*classes, count=5):
    """What the reader says of a line: each step one class with nearly all of the score."""
    scores = np.full((len(classes), count), 0.001, np.float32)
    scores[np.arange(len(classes)), classes] = 0.9
    return scores


class TestTexts:
    CHARACTERS = ("", "a", "b", "c", " ")

    @pytest.mark.parametrize(
        "classes, text",
        [
            ((0, 1, 0, 2), "ab"),
            ((1, 1, 1), "a"),
            ((1, 0, 1), "aa"),
            ((0, 0), ""),
            ((1, 4, 2), "a b"),
            ((4, 1, 4), "a"),
            ((3, 3, 4, 4, 3), "c c"),
        ],
    )
    def test_repeats_and_blanks_are_left_out(self, classes, text):
        assert vision.text_of(steps_of(*classes), self.CHARACTERS).text == text

    def test_a_shy_space_is_read(self):
        scores = steps_of(1, 0, 2)
        scores[1, 4] = 0.06
        assert vision.text_of(scores, self.CHARACTERS).text == "a b"
        scores[1, 4] = 0.04
        assert vision.text_of(scores, self.CHARACTERS).text == "ab"

    def test_the_score_is_that_of_the_characters(self):
        scores = steps_of(1, 0, 2)
        scores[2, 2] = 0.5
        assert vision.text_of(scores, self.CHARACTERS).score == pytest.approx(0.7)
        assert vision.text_of(steps_of(0, 0), self.CHARACTERS).score == 0

    @given(st.integers(1, 400), st.integers(1, 400))
    @settings(max_examples=30)
    def test_inputs_have_the_width_of_their_key(self, height, width):
        line = np.zeros((height, width, 3), np.uint8)
        room = vision.reader_width(line)
        assert vision.reader_input(line).shape == (3, 48, room)
        assert room % vision.LINE_WIDTH_STEP == 0
        assert vision.classifier_input(line).shape == (3, 48, 192)


# ---------------------------------------------------------------------------------------------------------------------
# The page


class TestReadingOrder:
    @given(
        st.lists(st.lists(st.integers(2, 8), min_size=1, max_size=3), min_size=1, max_size=6),
        st.floats(-180, 180),
        st.randoms(use_true_random=False),
    )
    @settings(max_examples=60)
    def test_rows_are_found_however_the_page_lies(self, page, degrees, shuffle):
        quads, rows = [], []
        for down, widths in enumerate(page):
            rows.append([])
            left = 0
            for width in widths:
                rows[-1].append(len(quads))
                flat = rectangle((left + width * 10, down * 40), (width * 20, 24), 0)
                quads.append((flat @ rotation(degrees)).astype(np.float32))
                left += width * 20 + 30
        order = list(range(len(quads)))
        shuffle.shuffle(order)
        found = vision.in_reading_order([quads[place] for place in order])
        assert [[order[place] for place in row] for row in found] == rows

    def test_an_empty_page_has_no_rows(self):
        assert vision.in_reading_order([]) == []

    def test_a_line_on_its_head_starts_at_the_other_end(self):
        quad = rectangle((50, 50), (40, 10), 0)
        assert np.allclose(vision.turned_round(quad), rectangle((50, 50), (40, 10), 180), atol=1e-4)

    def test_drawing_leaves_the_picture_as_it_was(self):
        picture = np.full((100, 100, 3), 255, np.uint8)
        framed = vision.drawn(picture, [rectangle((50, 50), (60, 20), 5)])
        assert (framed != picture).any()
        assert picture.min() == 255


def rotation(degrees):
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    return np.array([(cosine, sine), (-sine, cosine)])


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_errors_are_counted_as_edits(truth, read):
    assert demo.errors_of(truth, truth) == 0
    assert demo.errors_of(truth, read) == demo.errors_of(read, truth)
    assert abs(len(truth) - len(read)) <= demo.errors_of(truth, read) <= max(len(truth), len(read))


def test_the_pictures_are_those_of_the_script(tmp_path):
    make.make(tmp_path)
    for name in NAMES:
        assert (tmp_path / f"{name}.txt").read_text() == (PICTURES / f"{name}.txt").read_text()
        made, kept = (cv2.imread(str(folder / f"{name}.jpg")).astype(int) for folder in (tmp_path, PICTURES))
        assert np.abs(made - kept).mean() < 1
        assert (PICTURES / f"{name}.jpg").stat().st_size < 200_000


# ---------------------------------------------------------------------------------------------------------------------
# Whole pictures


@pytest.fixture(scope="module")
def example():
    return load_script(EXAMPLE / "model.py", "example_ocr_model")


def picture_of(name):
    return (PICTURES / f"{name}.jpg").read_bytes(), (PICTURES / f"{name}.txt").read_text(encoding="utf-8").strip()


def photographed(lines, degrees=0.0):
    """A picture that no number in the example was chosen with."""
    sheet = make.page(lines, 700, (235, 235, 235), (40, 40, 40))
    height, width = sheet.shape[:2]
    side = max(height, width)
    turn = cv2.getRotationMatrix2D((width / 2, height / 2), degrees, 0.9)
    turn[:, 2] += ((side - width) / 2, (side - height) / 2)
    scene = cv2.warpAffine(sheet, turn, (side, side), borderValue=(120, 130, 140)).astype(float)
    return encoded(make.photographed(scene, np.random.default_rng(1), shade=0.3, blur=0.6, grain=6))


OTHER_LINES = [
    make.Line("Library of Natural History", 44, weight=700),
    make.Line("Open daily from 10 to 18 h", 34),
    make.Line("Reading room on floor 3", 34, "uni"),
    make.Line("No food or drinks, please", 34, "italic"),
]
OTHER_TEXT = "\n".join(line.text for line in OTHER_LINES)


class TestPages:
    def test_less_than_two_characters_in_a_hundred_are_wrong(self, example):
        wrong = total = 0
        for name in NAMES:
            picture, truth = picture_of(name)
            wrong += demo.errors_of(truth, example.ocr.run(picture).text)
            total += len(truth)
        assert wrong / total < 0.02

    @pytest.mark.parametrize("degrees", [-12, 90, 175])
    def test_a_picture_it_was_not_made_with(self, example, degrees):
        page = example.ocr.run(photographed(OTHER_LINES, degrees))
        assert demo.errors_of(OTHER_TEXT, page.text) / len(OTHER_TEXT) < 0.05
        assert len(page.lines) == len(OTHER_LINES)
        assert min(line.score for line in page.lines) > 0.8

    def test_a_picture_without_text_is_an_empty_page(self, example):
        page = example.ocr.run(encoded(np.full((200, 300, 3), 200, np.uint8)))
        assert (page.text, page.lines) == ("", [])

    def test_the_reader_shares_a_run_only_where_nothing_is_padded(self, example):
        narrow, wide = (example.Line(np.zeros((48, width, 3), np.uint8), False) for width in (100, 500))
        also_narrow = example.Line(np.zeros((24, 51, 3), np.uint8), False)
        assert example.Read.batch_key(narrow) == example.Read.batch_key(also_narrow)
        assert example.Read.batch_key(narrow) != example.Read.batch_key(wide)


@pytest.fixture(scope="module")
def server(launch):
    return launch(EXAMPLE / "model.py")


def asked(server, picture, **query):
    waits = {"x-request-timeout-ms": f"{PATIENCE_S * 1000:.0f}"}
    return httpx.post(f"{server.url}/models/ocr", content=picture, params=query, headers=waits, timeout=PATIENCE_S)


def test_trap_31_each_picture_is_a_run_of_its_own(server):
    # trap 31: on a CPU batches do not make convolutions quicker
    with ThreadPoolExecutor(len(NAMES)) as threads:
        answers = list(threads.map(lambda name: asked(server, picture_of(name)[0]), NAMES))
    assert [answer.status_code for answer in answers] == [200] * len(NAMES)
    nodes = server.client.get("/models/ocr").json()["nodes"]
    detector = nodes["detect"]["batching"]
    assert (detector["max_batch_size"], detector["mean_batch_size"]) == (1, 1.0)
    assert detector["batches"] >= len(NAMES)
    assert nodes["turn"]["batching"]["mean_batch_size"] > 1  # lines are small


class TestServed:
    def test_everybody_gets_the_text_of_his_own_picture(self, server):
        asking = [picture_of(name) for name in NAMES] * 2
        with ThreadPoolExecutor(len(asking)) as clients:
            answers = list(clients.map(lambda pair: asked(server, pair[0]).raise_for_status().json(), asking))
        for (_, truth), page in zip(asking, answers, strict=True):
            assert demo.errors_of(truth, page["text"]) / len(truth) < 0.04
            assert all(len(line["corners"]) == 4 for line in page["lines"])
        lines = sum(len(page["lines"]) for page in answers)
        batches = server.metric("forebay_batch_size_count", endpoint="ocr/turn")
        assert 0 < batches < lines

    def test_the_lines_are_drawn_into_the_picture(self, server):
        picture, _ = picture_of("label")
        answer = asked(server, picture, draw=1).raise_for_status()
        assert answer.headers["content-type"] == "image/png"
        framed = cv2.imdecode(np.frombuffer(answer.content, np.uint8), cv2.IMREAD_COLOR)
        plain = vision.decoded(picture, 10_000_000)
        assert framed.shape == plain.shape
        assert (framed != plain).any()

    def test_a_query_that_makes_no_sense_is_refused(self, server):
        answer = asked(server, b"", draw="perhaps")
        assert answer.status_code == 422
        assert answer.json()["error"]["detail"] == {"path": "?draw"}

    def test_what_is_no_picture_is_the_clients_fault(self, server):
        answer = asked(server, b"%PDF-1.7")
        assert answer.status_code == 400
        assert "expected a JPEG or PNG file" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_demo_reads_all_pictures(tmp_path):
    command = [sys.executable, str(EXAMPLE / "demo.py"), "--rounds", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3 * PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TOTAL EUR 21,75" in done.stdout
    assert "character error rate" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png" for name in NAMES}
