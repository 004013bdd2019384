"""Detecting domains: by label, by model, by text."""

from __future__ import annotations

import json

import numpy as np
import pytest

from redraft.distill.data.conversations import load_conversations, split_held_out
from redraft.heads.files.artifact import publish
from redraft.online.records.origin import Origin
from redraft.online.traffic.domains import (
    CHARS_OF_A_MESSAGE,
    FACTORS,
    NUM_FEATURES,
    Clusters,
    Domains,
    features,
    load_token_decoder,
    prompt_text,
)
from redraft.recipes.serve.domains import read_prompts

CODE = [
    f"def function_{n}(self, value): return self.{name}(value)"
    for n, name in enumerate("abcdefghij")
]
ANIMALS = ["fox", "wolf", "bear", "owl", "deer"]
PROSE = [f"Once upon a time there was a {name} who lived in the forest" for name in ANIMALS]


@pytest.fixture(scope="module")
def clusters():
    return Clusters.fit(CODE + PROSE, 2).named_after(
        CODE + PROSE, ["code"] * len(CODE) + ["prose"] * len(PROSE)
    )


@pytest.mark.slow
def test_the_two_shipped_domains_are_told_apart_without_labels():
    train, held_out = split_held_out(load_conversations("stdlib"), 0.2)
    train = train[::8]
    clusters = Clusters.fit(read_prompts(train)[0], 2).named_after(*read_prompts(train))
    texts, labels = read_prompts(held_out)
    right = np.mean(
        [found == label for found, label in zip(clusters.assign(texts), labels, strict=True)]
    )
    assert sorted(clusters.names) == ["code", "prose"]
    assert len(texts) > 2000
    assert right >= 0.95


def test_a_request_is_of_the_nearest_cluster(clusters):
    domains = Domains(clusters=clusters)
    for domain, text in (
        ("code", "def another(self): return self.value"),
        ("prose", "There lived an old bear"),
    ):
        assert domains.detect(Origin(), {"prompt": text}) == domain
        assert domains.detect(Origin(), {"messages": [{"role": "user", "content": text}]}) == domain


def test_a_label_counts_before_the_models_name_and_that_before_the_text(clusters):
    domains = Domains(aliases={"m-prose": "prose"}, clusters=clusters)
    question = {"model": "m-prose", "prompt": CODE[0]}
    assert domains.detect(Origin(domain="maths"), question) == "maths"
    assert domains.detect(Origin(), question) == "prose"
    assert domains.detect(Origin(), question | {"model": "m"}) == "code"
    assert Domains().detect(Origin(), question) == ""


@pytest.mark.parametrize(
    ("question", "text"),
    [
        ({"prompt": "hello"}, "hello"),
        ({"prompt": ["hello", "world"]}, "hello"),
        ({"prompt": [1, 2]}, ""),
        ({"prompt": [[1, 2]]}, ""),
        ({"prompt": None}, ""),
        (
            {
                "messages": [
                    {"role": "system", "content": "s" * 999},
                    {"role": "user", "content": "why?"},
                ]
            },
            "s" * 256 + "\nwhy?",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "image_url"}],
                    }
                ]
            },
            "a",
        ),
        ({"messages": [{"role": "assistant", "content": None}, "odd"]}, ""),
        ({"prompt": "x" * 9999}, "x" * 512),
    ],
)
def test_the_text_of_a_request_is_its_beginning(question, text):
    assert CHARS_OF_A_MESSAGE == 256
    assert prompt_text(question) == text


def test_an_unreadable_prompt_has_no_domain(clusters):
    domains = Domains(clusters=clusters)
    for question in (None, [], {"prompt": [1, 2]}, {"messages": []}, {}):
        assert domains.detect(Origin(), question) == ""


def test_prompts_of_token_ids_are_read_with_the_targets_tokenizer(
    clusters, random_target, small_tokenizer
):
    domains = Domains(clusters=clusters, decode=load_token_decoder(random_target))
    for domain, text in (("code", CODE[0]), ("prose", PROSE[0])):
        assert domains.detect(Origin(), {"prompt": small_tokenizer(text)["input_ids"]}) == domain


def test_a_target_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_token_decoder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"{tmp_path}/tokenizer\.json\b"):
        load_token_decoder(tmp_path)


def test_clusters_come_back_as_they_were(clusters, tmp_path):
    publish(tmp_path / "domains", clusters.write, {})
    again = Clusters.read(tmp_path / "domains")
    assert again.names == clusters.names
    np.testing.assert_array_equal(again.distances(CODE + PROSE), clusters.distances(CODE + PROSE))
    assert not list((tmp_path / "domains").glob("*.pkl"))


def test_the_same_prompts_give_the_same_clusters(clusters):
    np.testing.assert_array_equal(Clusters.fit(CODE + PROSE, 2).centroids_CF, clusters.centroids_CF)


def test_features_are_the_trigrams_of_words():
    row_F, again_F, empty_F = features(["To be", "be to  BE", ""])
    hashed = [
        sum(ord(c) * int(f) for c, f in zip(trigram, FACTORS, strict=True))
        for trigram in (" to", "to ", " be", "be ")
    ]
    expected = {number % 2**32 // (2**32 // NUM_FEATURES) for number in hashed}
    assert len(expected) == 4
    assert set(row_F.nonzero()[0]) == expected
    np.testing.assert_allclose(row_F[list(expected)], 0.5)
    np.testing.assert_array_equal(row_F, again_F)
    assert not empty_F.any()
    assert features(["\ud800"]).any()


def test_every_script_has_features_of_its_own():
    texts = ["быть или не быть", "生存还是毁灭", "to be or not to be", "a"]
    assert [np.count_nonzero(row_F) for row_F in features(texts)] == [
        len(trigrams(text)) for text in texts
    ]


def trigrams(text):
    words = [f" {word} " for word in text.split()]
    return {word[i : i + 3] for word in words for i in range(len(word) - 2)}


def test_distances_are_those_of_the_features(clusters):
    apart_NCF = features(CODE[:3])[:, None].astype(np.float64) - clusters.centroids_CF[None]
    exact_NC = (apart_NCF**2).sum(-1)
    np.testing.assert_allclose(clusters.distances(CODE[:3]) + 1, exact_NC, atol=1e-5)


def flip_a_byte(folder):
    path = folder / "centroids.safetensors"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_a_byte, r"centroids\.safetensors.*corrupt"),
        (
            lambda folder: (folder / "centroids.safetensors").unlink(),
            r"centroids\.safetensors.*missing",
        ),
        (lambda folder: (folder / "domains.json").write_text("{"), r"domains\.json.*\b1 bytes"),
        (lambda folder: (folder / "manifest.json").unlink(), r"manifest\.json"),
    ],
)
def test_damage_is_told_by_name(clusters, tmp_path, damage, message):
    publish(tmp_path / "domains", clusters.write, {})
    damage(tmp_path / "domains")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        Clusters.read(tmp_path / "domains")


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "domains.json").write_text("[]"),
        lambda folder: (folder / "domains.json").write_text(
            json.dumps({"names": ["a", "b"], "features": {}})
        ),
        lambda folder: Clusters(("a", "b"), np.zeros((3, NUM_FEATURES), np.float32)).write(folder),
        lambda folder: Clusters(("a", "a"), np.zeros((2, NUM_FEATURES), np.float32)).write(folder),
        lambda folder: (folder / "centroids.safetensors").write_bytes(b"not at all"),
    ],
)
def test_what_was_published_but_is_no_domains_is_refused(clusters, tmp_path, change):
    def write(folder):
        clusters.write(folder)
        change(folder)

    publish(tmp_path / "domains", write, {})
    with pytest.raises(ValueError, match="`redraft data domains`"):
        Clusters.read(tmp_path / "domains")


@pytest.mark.parametrize("count", [1, 16])
def test_more_domains_than_prompts_or_only_one_are_refused(count):
    with pytest.raises(ValueError, match=rf"^{count} .*\b15\b"):
        Clusters.fit(CODE + PROSE, count)


def test_a_cluster_without_a_label_of_its_own_keeps_its_number(clusters):
    texts = CODE + PROSE
    assert clusters.named_after(texts, ["all"] * 15).names == clusters.names
    assert clusters.named_after(texts, ["кот"] * 10 + ["tales"] * 5).names == ("code", "tales")
