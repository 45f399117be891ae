{# The keys that a token sees, by rank: [0, head), then [tail, tail + plain - head), then those whose bit is set in its mask block.
   Ranks are dealt to lanes, so a token of a tree has the bits that its path alone would have. #}
struct Visible { head: u32, tail: u32, plain: u32, count: u32, first: u32, end: u32, bits: u32 }
struct Cursor { word: u32, before: u32, here: u32 } // mask bits `here` of `word`, and how many are set in front of it
const NOTHING = Visible(0u, 0u, 0u, 0u, 0u, 0u, 0u);
// count 0: a position, page table or mask block leaves its buffer, no key is visible, or more are than this kernel may loop over.
fn visible(t: u32) -> Visible {
  let pos = token_word(t, 2u);
  let pages = token_word(t, 4u);
  let window = token_word(t, 5u);
  let block = token_word(t, 7u);
  let size = arrayLength(&step);
  var first = pos + 1u; // keys in front of it follow window and sinks
  var end = first;
  if (block != 0u) {
    if (block < 16u || block > size - 2u) { return NOTHING; }
    first = step[block];
    end = step[block + 1u];
  }
  if (first > end || end == 0u || end > cache_slots() || pages > size || (end - 1u) / PAGE >= size - pages) { return NOTHING; }
  var tail = 0u;
  if (window != 0u && pos >= window) { tail = min(pos - window + 1u, first); }
  let head = min(token_word(t, 6u), tail);
  var seen = Visible(head, tail, head + first - tail, head + first - tail, first, end, block + 2u);
  if (block != 0u) {
    let words = (end - first + 31u) / 32u;
    if (words > {{ positions // 32 }}u || words > size - seen.bits) { return NOTHING; }
    for (var w = 0u; w < words; w++) { seen.count += countOneBits(mask_word(seen, w)); }
  }
  if (seen.count > {{ positions }}u) { return NOTHING; }
  return seen;
}
fn cache_slots() -> u32 { return min(arrayLength(&k_cache), arrayLength(&v_cache)) / {{ kv_heads * vecs }}u; }
// Word `w` of the mask; bits at and behind `end` are clear.
fn mask_word(seen: Visible, w: u32) -> u32 {
  let left = seen.end - seen.first - 32u * w;
  return step[seen.bits + w] & select((1u << (left & 31u)) - 1u, 0xFFFFFFFFu, left >= 32u);
}
fn cursor_at_start(seen: Visible) -> Cursor {
  if (seen.end == seen.first) { return Cursor(0u, 0u, 0u); }
  return Cursor(0u, 0u, mask_word(seen, 0u));
}
// The key of rank n < plain.
fn plain_at(seen: Visible, n: u32) -> u32 { return select(n - seen.head + seen.tail, n, n < seen.head); }
// The key of rank n < count; ranks of one cursor ascend.
fn visible_at(seen: Visible, n: u32, cursor: ptr<function, Cursor>) -> u32 {
  if (n < seen.plain) { return plain_at(seen, n); }
  var rank = n - seen.plain;
  var at = *cursor;
  loop {
    let ones = countOneBits(at.here);
    if (rank < at.before + ones || 32u * (at.word + 1u) >= seen.end - seen.first) { break; }
    at = Cursor(at.word + 1u, at.before + ones, mask_word(seen, at.word + 1u));
  }
  *cursor = at;
  rank -= at.before;
  var here = at.here;
  var key = seen.first + 32u * at.word;
{% for width in (16, 8, 4, 2, 1) %}
  let low{{ width }} = countOneBits(here & {{ 2 ** width - 1 }}u);
  let above{{ width }} = rank >= low{{ width }};
  rank -= select(0u, low{{ width }}, above{{ width }});
  here >>= select(0u, {{ width }}u, above{{ width }});
  key += select(0u, {{ width }}u, above{{ width }});
{% endfor %}
  return key;
}
// A page beyond 2^28 does not wrap around into the cache.
fn slot_of(pages: u32, p: u32) -> u32 { return min(step[pages + p / PAGE], 0x0FFFFFFFu) * PAGE + p % PAGE; }
// Compilers refuse a constant NaN.
fn nan(t: u32) -> f32 { return bitcast<f32>(0x7FC00000u | (t & 0u)); }
