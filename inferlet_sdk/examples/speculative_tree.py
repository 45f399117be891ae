"""Speculative decoding by n-gram lookup: what followed the last tokens before becomes a tree of drafts, one pass verifies it, and the
path that the model agrees with is committed. The tokens are those of plain greedy decoding, in fewer passes."""

from inferlet import chat, model
from inferlet.eta import ForwardPass, Pipeline, StateGeometry, WorkingSet, intrinsics, reduce_argmax


class Drafts:
    """A tree of token ids. Node 0 is the last token known; the children of a node are guesses of what follows it."""

    def __init__(self, last: int):
        self.ids, self.parents = [last], [-1]
        self.children = {}  # (node, token) -> node

    def add(self, tokens: list[int], most: int):
        """Add a path from the root, while there are fewer than `most` nodes."""
        node = 0
        for token in tokens:
            if (node, token) not in self.children:
                if len(self.ids) >= most:
                    return
                self.children[node, token] = len(self.ids)
                self.ids.append(token)
                self.parents.append(node)
            node = self.children[node, token]

    def agreed(self, chosen: list[int]) -> tuple[list[int], list[int]]:
        """(nodes that the model would have gone through, the tokens that it chose along them). `chosen` is its choice at each node."""
        path, tokens = [0], [chosen[0]]
        while (path[-1], tokens[-1]) in self.children:
            path.append(self.children[path[-1], tokens[-1]])
            tokens.append(chosen[path[-1]])
        return path, tokens


def look_up(tokens: list[int], n: int, depth: int, most: int) -> Drafts:
    """Drafts from the places where the last `n` tokens, or fewer, occurred before, the latest and longest first."""
    drafts = Drafts(tokens[-1])
    for size in range(min(n, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == suffix:
                drafts.add(tokens[end : end + depth], most)
    return drafts


async def main(input: dict) -> dict:
    """Input: prompt, max_tokens (32), drafts (12; 0 is plain greedy decoding), depth (6), ngram (3)."""
    limit, most = int(input.get("max_tokens", 32)), 1 + int(input.get("drafts", 12))
    depth, n = int(input.get("depth", 6)), int(input.get("ngram", 3))
    if limit < 1 or not 1 <= most <= 32:
        raise ValueError(f"max_tokens is {limit} and drafts {most - 1}; use 1 or more, and 0 to 31")
    tokens = chat.prefix() + model.encode(input.get("prompt", "one two three one two three one two"))
    prompt, ws, pipe, passes = len(tokens), WorkingSet(), Pipeline(), 0

    if prompt > 1:
        fwd = ForwardPass()
        fwd.embed(tokens[:-1])
        fwd.state([ws], StateGeometry.folding())
        pipe.submit(fwd)
    while len(tokens) - prompt < limit:
        drafts = look_up(tokens, n, depth, most)
        fwd = ForwardPass()
        fwd.embed(drafts.ids)
        fwd.state([ws], StateGeometry.buffered(tree=drafts.parents))
        fwd.read(list(range(len(drafts.ids))))
        chosen = fwd.epilogue(lambda: reduce_argmax(intrinsics.outputs("logits")))
        pipe.submit(fwd)
        path, new = drafts.agreed(await chosen)
        ws.commit(path)
        passes += 1
        stop = next((k for k, token in enumerate(new) if token in model.eos), None)
        tokens += new[:stop]
        if stop is not None:
            break
    pipe.close()

    made = tokens[prompt:][:limit]
    return {"text": model.decode(made), "tokens": made, "passes": passes}
