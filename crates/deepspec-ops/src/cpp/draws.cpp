// Softmax distributions over the vocabulary and sampling from them, for float32 rows on the CPU. A row's result does
// not depend on the other rows.
#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/record_function.h>

namespace {

// Tokens between two stored prefix sums.
constexpr int64_t kPiece = 256;
// Rows that are summed side by side, because each sum is a chain of dependent additions.
constexpr int64_t kChains = 4;

// softmax(logits / temperature).
DEEPSPEC_VECTORS void distribution_row(const float* __restrict logits, float temperature, int64_t vocab, float* __restrict out) {
  for (int64_t i = 0; i < vocab; ++i) out[i] = logits[i] / temperature;
  const float share = static_cast<float>(1.0 / weigh(out, largest(out, vocab), vocab));
  for (int64_t i = 0; i < vocab; ++i) out[i] *= share;
}

// For each row, finds the first token whose cumulative weight, in float64, exceeds the row's uniform number times the
// total weight.
template <int64_t kRows>
void draw_rows(const float* weights, int64_t vocab, const double* uniforms, int64_t* tokens) {
  const int64_t pieces = (vocab + kPiece - 1) / kPiece;
  std::vector<double> before(pieces * kRows);  // the prefix sum before each piece
  double sums[kRows] = {};
  for (int64_t piece = 0; piece < pieces; ++piece) {
    std::copy_n(sums, kRows, before.data() + piece * kRows);
    for (int64_t i = piece * kPiece; i < std::min(vocab, (piece + 1) * kPiece); ++i)
      for (int64_t row = 0; row < kRows; ++row) sums[row] += weights[row * vocab + i];
  }
  for (int64_t row = 0; row < kRows; ++row) {
    const double threshold = sums[row] * uniforms[row];
    int64_t piece = 0;
    while (piece + 1 < pieces && before[(piece + 1) * kRows + row] <= threshold) ++piece;
    int64_t token = piece * kPiece;
    for (double sum = before[piece * kRows + row]; token < vocab; ++token) {
      sum += weights[row * vocab + token];
      if (!(sum <= threshold)) break;
    }
    tokens[row] = std::min(token, vocab - 1);
  }
}

}  // namespace

extern "C" {

// softmax(logits / temperature) of rows [n, V] with temperatures [n]; not differentiable.
at::Tensor* ds_distributions(const at::Tensor* logits, const at::Tensor* temperatures) {
  return made([&]() -> at::Tensor {
    if (!rows_of_logits(*logits) || logits->numel() == 0 || !plain(*temperatures) || temperatures->numel() != logits->size(0)) return {};
    RECORD_USER_SCOPE("distributions");
    const int64_t vocab = logits->size(1);
    at::Tensor out = at::empty_like(*logits);
    const float *from = logits->const_data_ptr<float>(), *by = temperatures->const_data_ptr<float>();
    float* to = out.mutable_data_ptr<float>();
    for_rows(out, vocab, [=](int64_t row) { distribution_row(from + row * vocab, by[row], vocab, to + row * vocab); });
    return out;
  });
}

// Samples one token of each row of weights [n, V] with uniforms [n] in float64; returns tokens [n].
at::Tensor* ds_draw(const at::Tensor* weights, const at::Tensor* uniforms) {
  return made([&]() -> at::Tensor {
    if (!rows_of_logits(*weights) || weights->numel() == 0) return {};
    if (!uniforms->device().is_cpu() || uniforms->scalar_type() != at::kDouble || uniforms->numel() != weights->size(0)) return {};
    RECORD_USER_SCOPE("draw");
    const int64_t rows = weights->size(0), vocab = weights->size(1);
    const at::Tensor side_by_side = uniforms->contiguous();
    at::Tensor out = at::empty({rows}, weights->options().dtype(at::kLong));
    const float* from = weights->const_data_ptr<float>();
    const double* by = side_by_side.const_data_ptr<double>();
    int64_t* to = out.mutable_data_ptr<int64_t>();
    for_tasks((rows + kChains - 1) / kChains, std::max<int64_t>(1, kGrain / (kChains * vocab)), [=](int64_t group) {
      int64_t row = group * kChains;
      if (row + kChains <= rows) return draw_rows<kChains>(from + row * vocab, vocab, by + row, to + row);
      for (; row < rows; ++row) draw_rows<1>(from + row * vocab, vocab, by + row, to + row);
    });
    return out;
  });
}
}
