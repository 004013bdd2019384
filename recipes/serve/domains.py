"""Find the domains of a fleet's prompts, for a draft per domain behind redraft router.

    $ redraft data domains --prompts prompts.jsonl --num-domains 4 --output outputs/domains
    $ redraft data domains --prompts stdlib                              # the demo's domains: code and prose

Use a few thousand prompts or more as they come in: exported requests, or the training data of the
drafts. Prompts with similar wording form a domain (k-means over character trigrams). A draft per
domain pays off if the domains' answers differ, so read the typical prompts in the output, and
compare drafts with redraft eval.

If the data has a `domain` column (or --domain-column), the labels name each domain and measure its
purity on held-out prompts; the clusters do not depend on them. If requests name a domain
themselves, with X-Redraft-Domain or by the model's name, you do not need this command.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from redraft.distill.data.conversations import Conversation, load_conversations, split_held_out
from redraft.heads.files.artifact import publish
from redraft.heads.files.replaced import require_replaceable
from redraft.online.traffic.domains import Clusters, prompt_text


@dataclass(frozen=True, kw_only=True)
class Config:
    prompts: str = "stdlib"
    """Prompts to cluster: a hub name, a .jsonl or .parquet file, a folder of text, or stdlib."""
    output: Path = Path("outputs/domains")
    """Folder to write the domains to: the setting `clusters` in router.toml."""
    overwrite: bool = False
    """Replace the contents of `output`."""
    num_domains: int = 2
    """Number of domains, one per draft."""
    domain_column: str | None = None
    """Column with a label to compare the domains with. By default `domain`, if the data has it."""
    held_out: float = 0.1
    """Share of the prompts to hold out for measuring purity, from 0 to 1."""
    seed: int = 0
    """Seed of the clustering."""


def main(cfg: Config) -> None:
    require_replaceable(cfg.output, cfg, overwrite=cfg.overwrite)
    train, held_out = split_held_out(
        load_conversations(cfg.prompts, domain_column=cfg.domain_column), cfg.held_out
    )
    texts, labels = read_prompts(train)
    clusters = Clusters.fit(texts, cfg.num_domains, seed=cfg.seed).named_after(texts, labels)
    publish(
        cfg.output,
        clusters.write,
        {"config": asdict(cfg), "prompts": len(texts)},
        overwrite=cfg.overwrite,
    )
    unseen_texts, unseen_labels = read_prompts(held_out)
    print(f"made from {len(texts)} prompts; on {len(unseen_texts)} held-out prompts:")
    if unseen_texts:
        print(*describe_domains(clusters, unseen_texts, unseen_labels), sep="\n")
    print(f'published in {cfg.output}; in router.toml: clusters = "{cfg.output}"')


def read_prompts(conversations: Sequence[Conversation]) -> tuple[list[str], list[str]]:
    """(the prompt of every conversation's last answer as a router reads it, the labels)."""
    whole = (conversation["messages"] for conversation in conversations)
    texts = [
        prompt_text({"messages": some[:-1] if some[-1]["role"] == "assistant" else some})
        for some in whole
    ]
    labels = [conversation["domain"] for conversation in conversations]
    # Empty for a prompt other than text, which a router gives no domain.
    return [text for text in texts if text], [
        label for text, label in zip(texts, labels, strict=True) if text
    ]


def describe_domains(
    clusters: Clusters, texts: Sequence[str], labels: Sequence[str]
) -> Iterator[str]:
    """A line per domain.

    Size, purity (if there are at least two labels) and the most typical prompt.
    """
    distances_NC = clusters.distances(texts)  # N prompts, C clusters
    found = distances_NC.argmin(1).tolist()
    is_labelled, num_right = len(set(labels)) > 1, 0
    width = max(map(len, clusters.names))
    for cluster, name in enumerate(clusters.names):
        inside = [label for label, at in zip(labels, found, strict=True) if at == cluster]
        label, count = Counter(inside).most_common(1)[0] if inside else ("none", 0)
        num_right += count
        purity = f"{count / len(inside):6.1%} {label}  " if is_labelled and inside else ""
        # Over all prompts, not only those inside: a cluster without any still shows the nearest
        # one.
        typical = " ".join(texts[int(distances_NC[:, cluster].argmin())].split())
        yield (
            f"  {name:<{width}}  {len(inside) / len(texts):6.1%} of all  {purity}e.g. "
            f"{typical[:60]}"
        )
    if is_labelled:
        yield f"purity: {num_right / len(texts):.1%} have the most common label of their domain"
