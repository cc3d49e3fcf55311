// Attention of draft blocks after their anchors on a GPU, in bfloat16, by libtorch's fused kernels. Neighbouring
// blocks, in order of their anchors, form a tile. The context that all blocks of a tile see is the first part: it needs
// no mask, and one call computes it for all tiles. The remaining context and the blocks' own keys are the second part,
// with a mask. The two parts are merged by their log-sum-exp, and each backward uses the merged output, as in
// attention.cpp. Only copies of queries, keys and values and the mask are materialised. The fused backward sums query
// gradients in no fixed order.
#include "gpu.h"

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/_efficient_attention_backward.h>
#include <ATen/ops/_efficient_attention_forward.h>
#include <ATen/ops/_flash_attention_backward.h>
#include <ATen/ops/_flash_attention_forward.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

namespace tiled {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// Must match the struct in attention.cu.
struct Tiles {
  const int *seen, *offset, *block, *anchor, *place;
  int tiles, slots, size, repeats, groups, dim, rest, tokens;
};

struct Plan : torch::CustomClassHolder {
  Tensor numbers;  // the int32 storage of `tiles` and of the tensors below
  Tiles tiles{};
  Tensor queries_to, seen, keys_to, zeros;  // [tiles + 1], [tiles], [tiles + 1], [tiles + 1], int32
  int64_t blocks = 0, packed = 0, most_seen = 0;
  Tensor bias;  // [tiles, 1, rows, keys]
  double scale = 1.0;

  int64_t rows() const { return int64_t{tiles.slots} * tiles.size * tiles.repeats; }
  int64_t keys() const { return tiles.rest + int64_t{tiles.slots} * tiles.size; }
  int64_t line() const { return int64_t{tiles.groups} * tiles.dim; }
  int64_t slots() const { return int64_t{tiles.tiles} * tiles.slots; }
};

unsigned threads_for(int64_t values) { return static_cast<unsigned>(std::clamp<int64_t>((values / 8 + 31) / 32 * 32, 32, 256)); }

void* values(const Tensor& tensor) { return tensor.data_ptr(); }

// Gathers heads [A · B, H, D] into rows [tiles · rows, G, D].
Tensor gathered(const Plan& plan, const Tensor& heads, bool with_zeros) {
  Tensor rows = at::empty({plan.tiles.tiles * plan.rows(), plan.tiles.groups, plan.tiles.dim}, heads.options());
  const auto blocks = static_cast<unsigned>(plan.slots() * plan.tiles.size);
  gpu::run(gpu::Text::kAttention, "gather_heads", {{blocks, 1, 1}, threads_for(plan.line() * plan.tiles.repeats)}, heads, plan.tiles, values(heads),
           values(rows), static_cast<int>(with_zeros));
  return rows;
}

Tensor scattered(const Plan& plan, const Tensor& rows) {
  Tensor heads = at::empty({plan.blocks * plan.tiles.size, plan.line() * plan.tiles.repeats}, rows.options());
  const auto blocks = static_cast<unsigned>(heads.size(0));
  gpu::run(gpu::Text::kAttention, "scatter_heads", {{blocks, 1, 1}, threads_for(heads.size(1))}, rows, plan.tiles, values(rows), values(heads));
  return heads;
}

Tensor rest(const Plan& plan, const Tensor& context, const Tensor& own) {
  Tensor out = at::empty({plan.tiles.tiles, plan.keys(), plan.tiles.groups, plan.tiles.dim}, context.options());
  const gpu::Shape shape{{static_cast<unsigned>(plan.keys()), static_cast<unsigned>(plan.tiles.tiles), 1}, threads_for(plan.line())};
  gpu::run(gpu::Text::kAttention, "gather_rest", shape, context, plan.tiles, values(context), values(own), values(out));
  return out;
}

Tensor packed(const Plan& plan, const Tensor& context) {
  Tensor out = at::empty({plan.packed, plan.tiles.groups, plan.tiles.dim}, context.options());
  const gpu::Shape shape{{static_cast<unsigned>(plan.most_seen), static_cast<unsigned>(plan.tiles.tiles), 1}, threads_for(plan.line())};
  gpu::run(gpu::Text::kAttention, "pack_seen", shape, context, plan.tiles, values(context), values(out));
  return out;
}

Tensor summed(const Plan& plan, const Tensor& of_packed, const Tensor& of_rest) {
  Tensor out = at::empty({plan.tiles.tokens, plan.tiles.groups, plan.tiles.dim}, of_rest.options());
  const gpu::Shape shape{{static_cast<unsigned>(plan.tiles.tokens), 1, 1}, threads_for(plan.line())};
  gpu::run(gpu::Text::kAttention, "sum_slopes", shape, of_rest, plan.tiles, values(of_packed), values(of_rest), values(out));
  return out;
}

Tensor own_of(const Plan& plan, const Tensor& of_rest) {
  Tensor out = at::empty({plan.blocks * plan.tiles.size, plan.tiles.groups, plan.tiles.dim}, of_rest.options());
  const gpu::Shape shape{{static_cast<unsigned>(out.size(0)), 1, 1}, threads_for(plan.line())};
  gpu::run(gpu::Text::kAttention, "take_own", shape, of_rest, plan.tiles, values(of_rest), values(out));
  return out;
}

struct Attention : torch::autograd::Function<Attention> {
  // q [A·B, H, D], k and v [T, G, D], own_k and own_v [A·B, G, D]; returns [A·B, H·D].
  static Tensor forward(AutogradContext* ctx, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& own_k, const Tensor& own_v,
                        const c10::intrusive_ptr<Plan>& plan) {
    const Tiles& tiles = plan->tiles;
    const Tensor queries = gathered(*plan, q, false);
    const std::vector<int64_t> by_tile{tiles.tiles, plan->rows(), tiles.groups, tiles.dim};
    const Tensor bias = plan->bias.expand({-1, tiles.groups, -1, -1});
    auto [out, log, seed, offset, most_q, most_k] = at::_efficient_attention_forward(
        queries.view(by_tile), rest(*plan, k, own_k), rest(*plan, v, own_v), bias, {}, {}, {}, {}, 0.0, 0, /*compute_log_sumexp=*/true, plan->scale);
    out = out.contiguous();
    log = log.contiguous();
    // The backward takes the state of the dropout generator, although nothing is dropped.
    Tensor first, first_log, state = seed, unused = offset;
    if (plan->packed > 0) {
      std::tie(first, first_log, state, unused, std::ignore) =
          at::_flash_attention_forward(queries, k, v, plan->queries_to, plan->zeros, plan->rows(), plan->most_seen, 0.0, false, false, plan->scale, {},
                                       {}, plan->seen);
      first = first.contiguous();
      first_log = first_log.contiguous();
    } else {
      // No tile has keys in the first part, so the merge does not read it.
      first = out;
      first_log = at::empty({tiles.groups, queries.size(0)}, log.options());
    }
    gpu::run(gpu::Text::kAttention, "merge_parts", {{static_cast<unsigned>(queries.size(0)), 1, 1}, threads_for(plan->line())}, queries, tiles, values(first),
             values(first_log), values(out), values(log), static_cast<int>(log.size(2)));
    ctx->save_for_backward({q, k, v, own_k, own_v, out, first_log, log, seed, offset, state, unused});
    ctx->saved_data["plan"] = c10::IValue::make_capsule(plan);
    return scattered(*plan, out);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& gradients) {
    const auto saved = ctx->get_saved_variables();
    const Tensor &q = saved[0], &k = saved[1], &v = saved[2], &own_k = saved[3], &own_v = saved[4], &out = saved[5], &first_log = saved[6],
                 &log = saved[7];
    const auto plan = c10::static_intrusive_pointer_cast<Plan>(ctx->saved_data["plan"].toCapsule());
    const Tiles& tiles = plan->tiles;
    const Tensor queries = gathered(*plan, q, false), slopes = gathered(*plan, gradients[0].contiguous(), true);
    const std::vector<int64_t> by_tile{tiles.tiles, plan->rows(), tiles.groups, tiles.dim};
    auto [dq, rest_dk, rest_dv, by_bias] = at::_efficient_attention_backward(
        slopes.view(by_tile), queries.view(by_tile), rest(*plan, k, own_k), rest(*plan, v, own_v), plan->bias.expand({-1, tiles.groups, -1, -1}),
        out.view(by_tile), {}, {}, plan->rows(), plan->keys(), log, 0.0, saved[8], saved[9], 0, /*bias_requires_grad=*/false, plan->scale);
    rest_dk = rest_dk.contiguous(), rest_dv = rest_dv.contiguous();
    dq = dq.reshape(queries.sizes()).contiguous();
    Tensor seen_dk = rest_dk, seen_dv = rest_dv;  // not read if nothing is packed
    if (plan->packed > 0) {
      Tensor seen_dq;
      std::tie(seen_dq, seen_dk, seen_dv) = at::_flash_attention_backward(
          slopes, queries, packed(*plan, k), packed(*plan, v), out.view(queries.sizes()), first_log, plan->queries_to, plan->keys_to, plan->rows(),
          plan->most_seen, 0.0, false, saved[10], saved[11], plan->scale);
      dq = dq + seen_dq;
      seen_dk = seen_dk.contiguous(), seen_dv = seen_dv.contiguous();
    }
    return {scattered(*plan, dq).view_as(q), summed(*plan, seen_dk, rest_dk).view_as(k), summed(*plan, seen_dv, rest_dv).view_as(v),
            own_of(*plan, rest_dk).view_as(own_k), own_of(*plan, rest_dv).view_as(own_v), Tensor()};
  }
};

bool takes(const Tensor& tensor, const Tensor& like) {
  return tensor.device() == like.device() && tensor.scalar_type() == at::kBFloat16 && tensor.dim() == 3 && tensor.size(2) == like.size(2);
}

}  // namespace tiled

extern "C" {

// Whether tiled attention is available for heads of `dim` values on the device of `like`.
bool ds_attends_in_tiles(const at::Tensor* like, int64_t dim) {
  try {
    // For wide heads the fused backward needs more shared memory than small GPUs have.
    constexpr unsigned kOfWide = 160 << 10;
    const bool fits = dim % 8 == 0 && (dim <= 192 || (dim <= 256 && gpu::shared_memory(*like) >= kOfWide));
    return fits && gpu::has_kernels(*like, gpu::Text::kAttention);
  } catch (...) {
    return false;
  }
}

// The keys that the blocks of a sequence see, for all layers. `numbers`, int32 on the GPU, starts with the arrays of
// `Tiles`. Three arrays [tiles + 1] follow: the tiles' cumulative numbers of queries and of packed keys, and zeros.
struct TiledBlocks {
  int64_t tiles, slots, size, repeats, groups, dim, rest, tokens, blocks, packed, most_seen;
  double scale;
};

char* ds_tiled_plan(const at::Tensor* numbers, const TiledBlocks* of, tiled::Plan** out) {
  return caught([&] {
    auto plan = c10::make_intrusive<tiled::Plan>();
    const auto as = [](int64_t value) { return static_cast<int>(value); };
    const int64_t all = of->tiles * of->slots;
    TORCH_CHECK(numbers->scalar_type() == at::kInt && numbers->is_contiguous() &&
                    numbers->numel() == 2 * of->tiles + 2 * all + of->blocks + 3 * (of->tiles + 1),
                "numbers of tiles do not fit");
    plan->numbers = *numbers;
    int64_t first = 0;
    const auto next = [&](int64_t count) {
      first += count;
      return numbers->narrow(0, first - count, count);
    };
    const at::Tensor seen = next(of->tiles), offset = next(of->tiles), block = next(all), anchor = next(all), place = next(of->blocks);
    plan->seen = seen;
    plan->queries_to = next(of->tiles + 1), plan->keys_to = next(of->tiles + 1), plan->zeros = next(of->tiles + 1);
    const auto begin = [](const at::Tensor& part) { return part.const_data_ptr<int>(); };
    plan->tiles = {begin(seen),     begin(offset),     begin(block),   begin(anchor), begin(place),  as(of->tiles),
                   as(of->slots),   as(of->size),      as(of->repeats), as(of->groups), as(of->dim), as(of->rest), as(of->tokens)};
    plan->blocks = of->blocks, plan->packed = of->packed, plan->most_seen = of->most_seen, plan->scale = of->scale;
    plan->bias = at::empty({of->tiles, 1, plan->rows(), plan->keys()}, numbers->options().dtype(at::kBFloat16));
    const gpu::Shape shape{{static_cast<unsigned>(plan->rows()), static_cast<unsigned>(of->tiles), 1}, 128};
    gpu::run(gpu::Text::kAttention, "write_bias", shape, *numbers, plan->tiles, plan->bias.data_ptr());
    *out = plan.release();
  });
}

void ds_tiled_plan_free(tiled::Plan* plan) { c10::intrusive_ptr<tiled::Plan>::reclaim(plan); }

// See `tiled::Attention`.
char* ds_attend_in_tiles(const at::Tensor* q, const at::Tensor* k, const at::Tensor* v, const at::Tensor* own_k, const at::Tensor* own_v, tiled::Plan* plan,
                         at::Tensor** out) {
  return caught([&] {
    for (const at::Tensor* each : {q, k, v, own_k, own_v}) TORCH_CHECK(tiled::takes(*each, *q), "heads do not fit each other");
    const auto shared = c10::intrusive_ptr<tiled::Plan>::reclaim_copy(plan);
    const int64_t positions = shared->blocks * shared->tiles.size;
    TORCH_CHECK(q->size(0) == positions && q->size(1) == shared->tiles.groups * shared->tiles.repeats && q->size(2) == shared->tiles.dim &&
                    k->size(0) == shared->tiles.tokens && v->sizes() == k->sizes() && k->size(1) == shared->tiles.groups &&
                    own_k->size(0) == positions && own_v->sizes() == own_k->sizes() && own_k->size(1) == shared->tiles.groups,
                "heads do not fit their tiles");
    *out = new at::Tensor(tiled::Attention::apply(q->contiguous(), k->contiguous(), v->contiguous(), own_k->contiguous(), own_v->contiguous(), shared));
  });
}
}
