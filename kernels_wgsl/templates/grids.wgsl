{# Arguments of indirect dispatches: the grids of a plan, or no workgroups when gates have emptied the step. #}
@compute @workgroup_size(1)
fn main() {
  let live = u32(step[0] != 0u);
{% for n in words %}
  grids[{{ loop.index0 }}] = live * {{ n }}u;
{% endfor %}
}
