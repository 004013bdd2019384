"""Find the domains of a fleet's prompts, so that each can have a draft of its own and redraft router tell them apart.

    $ redraft domains --data prompts.jsonl --num-domains 4 --output outputs/domains
    $ redraft domains --data stdlib                                 # the demo's: code and prose

Take prompts as they come in, a few thousand or more: exported requests, or the data that drafts are trained on. Prompts
that share words and turns of phrase come into one domain (k-means over character trigrams). A draft per domain
pays where domains ask for different text, so look at the typical prompts below, and compare drafts with redraft eval.

Where the data has a `domain` column (or --domain-column), it says how pure each domain is, on prompts that were held
out, and gives it its name; nothing else is learned from it. Requests that are labelled anyway, by X-Redraft-Domain or
by the model's name, need none of this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from distill.data import Conversation, Message, load_conversations, split_held_out
from heads.artifact import publish, require_free
from online.domains import Clusters, prompt_text
from recipes.cli import run_recipe


@dataclass(frozen=True, kw_only=True)
class Config:
    data: str = "stdlib"
    """Hub name, .jsonl, .parquet, a folder of text, or stdlib."""
    output: Path = Path("outputs/domains")
    """Folder that receives them: `clusters` in router.toml."""
    overwrite: bool = False
    """Replace what is in `output`."""
    num_domains: int = 2
    """As many as there are to be drafts."""
    domain_column: str | None = None
    """Column of the data with a label, to compare with; by default `domain` where there is one."""
    held_out: float = 0.1
    """Share of the prompts that nothing is learned from, to count purity on."""
    seed: int = 0


def main(cfg: Config) -> None:
    require_free(cfg.output, overwrite=cfg.overwrite)
    train, held_out = split_held_out(load_conversations(cfg.data, domain_column=cfg.domain_column), cfg.held_out)
    texts, labels = prompts(train)
    clusters = Clusters.fit(texts, cfg.num_domains, seed=cfg.seed).named_after(texts, labels)
    publish(cfg.output, clusters.write, {"config": asdict(cfg), "prompts": len(texts)}, overwrite=cfg.overwrite)
    unseen = prompts(held_out)
    print(f"made of {len(texts)} prompts; on {len(unseen[0])} that were held out:")
    for line in lines(clusters, *unseen) if unseen[0] else ():
        print(line)
    print(f'published in {cfg.output}; in router.toml: clusters = "{cfg.output}"')


def prompts(conversations: Sequence[Conversation]) -> tuple[list[str], list[str]]:
    """What was asked before every conversation's last answer, as a router would read it, and its label."""
    texts = [prompt_text({"messages": _before_answer(conversation["messages"])}) for conversation in conversations]
    labels = [conversation["domain"] for conversation in conversations]
    return [text for text in texts if text], [label for text, label in zip(texts, labels, strict=True) if text]


def _before_answer(messages: Sequence[Message]) -> Sequence[Message]:
    return messages[:-1] if messages[-1]["role"] == "assistant" else messages


def lines(clusters: Clusters, texts: Sequence[str], labels: Sequence[str]) -> Iterator[str]:
    """Size, purity and the most typical prompt of every domain; purity where there are labels to count."""
    distances_NC = clusters.distances(texts)
    found = distances_NC.argmin(1).tolist()
    is_labelled, num_right = len(set(labels)) > 1, 0
    width = max(map(len, clusters.names))
    for cluster, name in enumerate(clusters.names):
        its_labels = [label for label, at in zip(labels, found, strict=True) if at == cluster]
        label, count = Counter(its_labels).most_common(1)[0] if its_labels else ("none", 0)
        num_right += count
        purity = f"{count / len(its_labels):6.1%} {label}  " if is_labelled and its_labels else ""
        typical = " ".join(texts[int(distances_NC[:, cluster].argmin())].split())
        yield f"  {name:<{width}}  {len(its_labels) / len(texts):6.1%} of all  {purity}such as: {typical[:60]}"
    if is_labelled:
        yield f"purity: {num_right / len(texts):.1%} have the label that is commonest in their domain"


if __name__ == "__main__":
    run_recipe(main, Config, __doc__)
