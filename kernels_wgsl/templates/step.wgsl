{# The step buffer's header and token table (docs/architecture.md, section 4). #}
const NONE: u32 = 0xFFFFFFFFu;
const PAGE: u32 = 16u;
fn token_word(t: u32, field: u32) -> u32 { return step[step[3] + 8u * t + field]; }
