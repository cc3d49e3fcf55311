// Distances of rows of logits from labels and from other logits, and the gradients of losses made of them. Everything
// is float32 on the CPU and in place; libtorch would make a dozen passes over the logits, with as many temporaries.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

namespace {

// Values that are summed in float32 before the sum is added in float64. A float32 sum over a whole vocabulary would
// show rounding errors.
constexpr int64_t kSpan = 1024;

// The sum of `each(i)` for i below `count`. `each` may modify element i.
template <typename Each>
DEEPSPEC_INLINE double summed(int64_t count, Each each) {
  double sum = 0.0;
  for (int64_t first = 0; first < count; first += kSpan) {
    const int64_t end = std::min(count, first + kSpan);
    float lanes[kLanes] = {};
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += each(i + lane);
    for (; i < end; ++i) lanes[0] += each(i);
    sum += folded(lanes);
  }
  return sum;
}

// Columns of a row's result.
enum Distance : int64_t { kCrossEntropy, kL1, kOverlap, kSoftCrossEntropy, kDivergence, kDistances };

// Distances of two rows of probabilities: Σ |p^d - p^t| and Σ min(p^d, p^t). The second is NaN if one of the
// probabilities is.
struct Apart {
  double l1 = 0.0, overlap = 0.0;
};

// Turns the drafter's weights into probabilities by `share`, one over their sum, and compares these with the target's.
DEEPSPEC_INLINE Apart divide_and_compare(float* __restrict draft, const float* __restrict target, int64_t vocab, float share) {
  Apart apart;
  for (int64_t first = 0; first < vocab; first += kSpan) {
    const int64_t end = std::min(vocab, first + kSpan);
    float l1[kLanes] = {}, overlap[kLanes] = {};
    const auto add = [&](int64_t i, int64_t lane) DEEPSPEC_INLINED {
      const float ours = draft[i] * share, theirs = target[i], difference = ours - theirs;
      draft[i] = ours;
      l1[lane] += std::fabs(difference);
      overlap[lane] += theirs + (difference > 0.0f ? 0.0f : difference);
    };
    int64_t i = first;
    for (; i + kLanes <= end; i += kLanes)
      for (int64_t lane = 0; lane < kLanes; ++lane) add(i + lane, lane);
    for (; i < end; ++i) add(i, 0);
    apart.l1 += folded(l1), apart.overlap += folded(overlap);
  }
  return apart;
}

// Replaces x by exp(x - most); returns the sum.
DEEPSPEC_INLINE double weigh(float* row, float most, int64_t vocab) {
  return summed(vocab, [=](int64_t i) DEEPSPEC_INLINED { return row[i] = exponential(row[i] - most); });
}

// Turns the target's logits into probabilities; returns their entropy if `entropy` is set, else 0.
DEEPSPEC_VECTORS double weigh_target_row(float* row, int64_t vocab, bool entropy) {
  const float most = largest(row, vocab);
  // Weighted by exp(logit - most), which is not yet divided by its sum.
  double weighed_logits = 0.0;
  if (entropy)
    weighed_logits = summed(vocab, [=](int64_t i) DEEPSPEC_INLINED { return exponential(row[i] - most) * (row[i] - most); });
  const double sum = weigh(row, most, vocab);
  const float share = static_cast<float>(1.0 / sum);
  for (int64_t i = 0; i < vocab; ++i) row[i] *= share;
  return entropy ? std::log(sum) - weighed_logits / sum : 0.0;
}

// Turns the drafter's logits into probabilities and measures their distances from the target's probabilities.
DEEPSPEC_VECTORS void measure_row(
    float* draft, const float* target, double entropy, int64_t label, int64_t vocab, bool soft, float* found) {
  const float most = largest(draft, vocab), chosen = draft[label] - most;
  double by_target = 0.0;
  if (soft) {
    by_target = summed(vocab, [=](int64_t i) DEEPSPEC_INLINED { return target[i] * (draft[i] - most); });
    // Due to rounding, the probabilities do not sum to exactly 1.
    by_target /= summed(vocab, [=](int64_t i) DEEPSPEC_INLINED { return target[i]; });
  }
  const double sum = weigh(draft, most, vocab);
  const Apart apart = divide_and_compare(draft, target, vocab, static_cast<float>(1.0 / sum));
  const double soft_cross_entropy = std::log(sum) - by_target;
  found[kCrossEntropy] = static_cast<float>(std::log(sum) - chosen);
  found[kL1] = static_cast<float>(apart.l1);
  found[kOverlap] = static_cast<float>(apart.overlap);
  found[kSoftCrossEntropy] = soft ? static_cast<float>(soft_cross_entropy) : 0.0f;
  found[kDivergence] = soft ? static_cast<float>(soft_cross_entropy - entropy) : 0.0f;
}

// Factors of a row's gradient terms: of p^d - onehot(label), of p^d - p^t, and of the gradient of |p^d - p^t|.
struct Factors {
  float label, soft, l1;
};

// Replaces the drafter's probabilities by the gradient with respect to its logits.
DEEPSPEC_VECTORS void slope_row(float* draft, const float* target, int64_t label, int64_t vocab, Factors by) {
  float factor = by.label + by.soft;
  if (by.l1 != 0.0f) {
    factor -= by.l1 * static_cast<float>(summed(vocab, [=](int64_t i) DEEPSPEC_INLINED {
      return draft[i] > target[i] ? draft[i] : draft[i] < target[i] ? -draft[i] : 0.0f;
    }));
  }
  for (int64_t i = 0; i < vocab; ++i) {
    const float sign = draft[i] > target[i] ? by.l1 : draft[i] < target[i] ? -by.l1 : 0.0f;
    const float along = draft[i] * (factor + sign);
    // A term with factor 0 must contribute nothing, even if it is NaN.
    draft[i] = by.soft != 0.0f ? along - by.soft * target[i] : along;
  }
  draft[label] -= by.label;
}

// Rows of float32, each contiguous.
struct Lines {
  float* at;
  int64_t line;  // floats from one row to the next

  float* operator[](int64_t row) const { return at + row * line; }
};

// Groups rows by their numbers, which are 0 to below `end`.
struct ByNumber {
  std::vector<int64_t> rows, starts;  // the rows of number s are rows[starts[s]] to below rows[starts[s + 1]]

  ByNumber(const int64_t* numbers, int64_t count, int64_t end) : rows(count), starts(end + 1) {
    for (int64_t i = 0; i < count; ++i) ++starts[numbers[i]];
    for (int64_t i = 0, before = 0; i <= end; ++i) before += std::exchange(starts[i], before);
    for (int64_t i = 0; i < count; ++i) rows[starts[numbers[i]]++] = i;
    std::copy_backward(starts.begin(), starts.end() - 1, starts.end());
    starts[0] = 0;
  }
};

// Writes the sum of the rows of a number, `width` values each, to `to`; zeros if the number has no rows.
void sum_rows(const Lines& rows, const ByNumber& by, int64_t number, int64_t width, float* to) {
  const int64_t *row = by.rows.data() + by.starts[number], *end = by.rows.data() + by.starts[number + 1];
  if (row == end) {
    std::fill_n(to, width, 0.0f);
    return;
  }
  std::copy_n(rows[*row], width, to);
  while (++row < end) add_row(to, rows[*row], width);
}

// Whether `tensor` is [n, V] with contiguous rows and belongs to no autograd graph, which would not notice that it is
// overwritten.
bool rows_of_logits(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kFloat || tensor.dim() != 2 || learns(tensor)) return false;
  return (tensor.stride(1) == 1 || tensor.size(1) <= 1) && (tensor.stride(0) >= tensor.size(1) || tensor.size(0) <= 1);
}

// One type serves rows that are read and rows that are written.
Lines lines(const at::Tensor& rows) { return {static_cast<float*>(rows.data_ptr()), rows.stride(0)}; }

// Whether `of` holds `count` numbers from 0 to below `end`. They become memory offsets.
bool places(const at::Tensor& of, int64_t count, int64_t end) {
  if (!of.device().is_cpu() || of.scalar_type() != at::kLong || !of.is_contiguous() || of.numel() != count) return false;
  const int64_t* place = of.const_data_ptr<int64_t>();
  return std::all_of(place, place + count, [=](int64_t at) { return at >= 0 && at < end; });
}

// Whether `numbers` holds one float64 for each row.
bool of_each_row(const at::Tensor& numbers, int64_t rows) {
  return numbers.device().is_cpu() && numbers.scalar_type() == at::kDouble && numbers.is_contiguous() && numbers.numel() == rows;
}

// Whether each row has a target row: the one that `source_of_row` names, or without it the row of the same index.
bool fits(const at::Tensor* source_of_row, int64_t rows, int64_t sources) {
  return source_of_row ? places(*source_of_row, rows, sources) : rows == sources;
}

}  // namespace

extern "C" {

// Turns the target's logits [S, V] into probabilities, in place. Returns their entropies [S] in float64, or zeros
// unless `entropy` is set.
at::Tensor* ds_weigh_target(const at::Tensor* logits, bool entropy) {
  return made([&]() -> at::Tensor {
    if (!rows_of_logits(*logits) || logits->numel() == 0) return {};
    RECORD_USER_SCOPE("weigh_target");
    const int64_t vocab = logits->size(1);
    at::Tensor out = at::empty({logits->size(0)}, logits->options().dtype(at::kDouble));
    const Lines rows = lines(*logits);
    double* found = out.mutable_data_ptr<double>();
    for_rows(*logits, vocab, [=](int64_t row) { found[row] = weigh_target_row(rows[row], vocab, entropy); });
    return out;
  });
}

// Turns the drafter's logits [n, V] into probabilities, in place, and compares them with the target's probabilities,
// whose entropies are [S]. Returns `Distance`s [n, 5]; the last two are 0 unless `soft` is set. With `source_of_row`
// [n], row i is compared with target row source_of_row[i].
at::Tensor* ds_measure_rows(
    const at::Tensor* draft, const at::Tensor* target, const at::Tensor* entropies, const at::Tensor* source_of_row, const at::Tensor* labels,
    bool soft) {
  return made([&]() -> at::Tensor {
    if (!rows_of_logits(*draft) || !rows_of_logits(*target) || !of_each_row(*entropies, target->size(0))) return {};
    const int64_t rows = draft->size(0), vocab = draft->size(1);
    if (target->size(1) != vocab || !places(*labels, rows, vocab) || !fits(source_of_row, rows, target->size(0))) return {};
    RECORD_USER_SCOPE("measure_rows");
    at::Tensor out = at::empty({rows, kDistances}, draft->options());
    const Lines ours = lines(*draft), theirs = lines(*target);
    float* found = out.mutable_data_ptr<float>();
    const double* entropy = entropies->const_data_ptr<double>();
    const int64_t *label = labels->const_data_ptr<int64_t>(), *place = source_of_row ? source_of_row->const_data_ptr<int64_t>() : nullptr;
    for_tasks(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, vocab)), [=](int64_t row) {
      const int64_t source = place ? place[row] : row;
      measure_row(ours[row], theirs[source], entropy[source], label[row], vocab, soft, found + row * kDistances);
    });
    return out;
  });
}

// Overwrites row s of `sums` [S, V] with the sum of those `rows` [n, V] whose `source_of_row` [n] is s. Returns whether
// the tensors are supported.
bool ds_sum_rows(const at::Tensor* rows, const at::Tensor* source_of_row, const at::Tensor* sums) {
  try {
    if (!rows_of_logits(*rows) || !rows_of_logits(*sums) || rows->size(1) != sums->size(1) || !places(*source_of_row, rows->size(0), sums->size(0)))
      return false;
    RECORD_USER_SCOPE("sum_rows");
    const int64_t width = rows->size(1), count = rows->size(0);
    const Lines from = lines(*rows), to = lines(*sums);
    const ByNumber by(source_of_row->const_data_ptr<int64_t>(), count, sums->size(0));
    for_tasks(sums->size(0), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), [&](int64_t sum) {
      sum_rows(from, by, sum, width, to[sum]);
    });
    return true;
  } catch (...) {
    return false;
  }
}

// Adds row source_of_row[i] of `values` [S, V] to row i of `rows` [n, V]. Returns whether the tensors are supported.
bool ds_add_to_rows(const at::Tensor* rows, const at::Tensor* source_of_row, const at::Tensor* values) {
  try {
    if (!rows_of_logits(*rows) || !rows_of_logits(*values) || rows->size(1) != values->size(1)) return false;
    if (!places(*source_of_row, rows->size(0), values->size(0))) return false;
    RECORD_USER_SCOPE("add_to_rows");
    const int64_t width = rows->size(1);
    const Lines to = lines(*rows), from = lines(*values);
    const int64_t* number = source_of_row->const_data_ptr<int64_t>();
    for_tasks(rows->size(0), std::max<int64_t>(1, kGrain / std::max<int64_t>(1, width)), [=](int64_t row) {
      add_row(to[row], from[number[row]], width);
    });
    return true;
  } catch (...) {
    return false;
  }
}

// Replaces the drafter's probabilities [n, V] by gradients, with factors [n, 3] in the order of `Factors`. Returns
// whether the tensors are supported.
bool ds_slope_rows(
    const at::Tensor* draft, const at::Tensor* target, const at::Tensor* source_of_row, const at::Tensor* labels, const at::Tensor* factors) {
  try {
    if (!rows_of_logits(*draft) || !rows_of_logits(*target) || target->size(1) != draft->size(1)) return false;
    const int64_t rows = draft->size(0), vocab = draft->size(1);
    if (!places(*labels, rows, vocab) || !fits(source_of_row, rows, target->size(0))) return false;
    if (!plain(*factors) || learns(*factors) || factors->dim() != 2 || factors->size(0) != rows || factors->size(1) != 3) return false;
    RECORD_USER_SCOPE("slope_rows");
    const Lines ours = lines(*draft), theirs = lines(*target);
    const float* factor = factors->const_data_ptr<float>();
    const int64_t *label = labels->const_data_ptr<int64_t>(), *place = source_of_row ? source_of_row->const_data_ptr<int64_t>() : nullptr;
    for_tasks(rows, std::max<int64_t>(1, kGrain / std::max<int64_t>(1, vocab)), [=](int64_t row) {
      const float* by = factor + row * 3;
      slope_row(ours[row], theirs[place ? place[row] : row], label[row], vocab, {by[0], by[1], by[2]});
    });
    return true;
  } catch (...) {
    return false;
  }
}
}
