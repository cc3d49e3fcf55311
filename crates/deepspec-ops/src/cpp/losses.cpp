// How far rows of logits are from labels and from other logits, and the gradients of what is made of these distances: float32, on the CPU, in place.
// libtorch makes a dozen passes of them, with as many temporaries.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>

namespace {

// Values whose sums are taken in float32, before these are added in float64: as many as there are tokens, rounding would be seen.
constexpr int64_t kSpan = 1024;

// The sum of `each(i)` over so many, which may change what belongs to i.
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

// What is found of a row, in this order.
enum Distance : int64_t { kCrossEntropy, kL1, kOverlap, kSoftCrossEntropy, kDivergence, kDistances };

// What two rows of probabilities differ by: Σ |p^d - p^t|, and Σ min(p^d, p^t), which is not a number where one of them is not.
struct Apart {
  double l1 = 0.0, overlap = 0.0;
};

// Makes the drafter's weights probabilities, by one over their sum.
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

// exp(x - most) in place of x; gives the sum.
DEEPSPEC_INLINE double weigh(float* row, float most, int64_t vocab) {
  return summed(vocab, [=](int64_t i) DEEPSPEC_INLINED { return row[i] = exponential(row[i] - most); });
}

// Turns the target's logits into probabilities; gives their entropy if that is asked for.
DEEPSPEC_VECTORS double weigh_target_row(float* row, int64_t vocab, bool entropy) {
  const float most = largest(row, vocab);
  // Of the weights, which are not divided by their sum yet.
  double weighed_logits = 0.0;
  if (entropy)
    weighed_logits = summed(vocab, [=](int64_t i) DEEPSPEC_INLINED { return exponential(row[i] - most) * (row[i] - most); });
  const double sum = weigh(row, most, vocab);
  const float share = static_cast<float>(1.0 / sum);
  for (int64_t i = 0; i < vocab; ++i) row[i] *= share;
  return entropy ? std::log(sum) - weighed_logits / sum : 0.0;
}

// Turns the logits of the drafter into probabilities and measures them against those of the target.
DEEPSPEC_VECTORS void measure_row(
    float* draft, const float* target, double entropy, int64_t label, int64_t vocab, bool soft, float* found) {
  const float most = largest(draft, vocab), chosen = draft[label] - most;
  double by_target = 0.0;
  if (soft) {
    by_target = summed(vocab, [=](int64_t i) DEEPSPEC_INLINED { return target[i] * (draft[i] - most); });
    // Rounding leaves the sum of the probabilities beside 1.
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

// Factors of a row's gradient: of p^d - onehot(label), of p^d - p^t, and of the slope of |p^d - p^t|.
struct Factors {
  float label, soft, l1;
};

// Puts the gradient by the drafter's logits in place of its probabilities.
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
    // What has no weight says nothing, even where it is not a number.
    draft[i] = by.soft != 0.0f ? along - by.soft * target[i] : along;
  }
  draft[label] -= by.label;
}

// Rows of float32, value behind value each.
struct Lines {
  float* at;
  int64_t line;  // from one to the next

  float* operator[](int64_t row) const { return at + row * line; }
};

// Rows by their numbers, 0 to below `end`.
struct ByNumber {
  std::vector<int64_t> rows, starts;  // those of number s from starts[s] to below starts[s + 1]

  ByNumber(const int64_t* numbers, int64_t count, int64_t end) : rows(count), starts(end + 1) {
    for (int64_t i = 0; i < count; ++i) ++starts[numbers[i]];
    for (int64_t i = 0, before = 0; i <= end; ++i) before += std::exchange(starts[i], before);
    for (int64_t i = 0; i < count; ++i) rows[starts[numbers[i]]++] = i;
    std::copy_backward(starts.begin(), starts.end() - 1, starts.end());
    starts[0] = 0;
  }
};

// Puts the sum of the rows of a number, `width` values each, in place of `to`: 0 where there is none.
void sum_rows(const Lines& rows, const ByNumber& by, int64_t number, int64_t width, float* to) {
  const int64_t *row = by.rows.data() + by.starts[number], *end = by.rows.data() + by.starts[number + 1];
  if (row == end) {
    std::fill_n(to, width, 0.0f);
    return;
  }
  std::copy_n(rows[*row], width, to);
  while (++row < end) add_row(to, rows[*row], width);
}

// [n, V], each row value behind value, and of no graph, which would not see that they are overwritten.
bool rows_of_logits(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || tensor.scalar_type() != at::kFloat || tensor.dim() != 2 || learns(tensor)) return false;
  return (tensor.stride(1) == 1 || tensor.size(1) <= 1) && (tensor.stride(0) >= tensor.size(1) || tensor.size(0) <= 1);
}

// One type for rows that are read and for those that are written.
Lines lines(const at::Tensor& rows) { return {static_cast<float*>(rows.data_ptr()), rows.stride(0)}; }

// [n] numbers from 0 to below `end`, which are places in memory.
bool places(const at::Tensor& of, int64_t count, int64_t end) {
  if (!of.device().is_cpu() || of.scalar_type() != at::kLong || !of.is_contiguous() || of.numel() != count) return false;
  const int64_t* place = of.const_data_ptr<int64_t>();
  return std::all_of(place, place + count, [=](int64_t at) { return at >= 0 && at < end; });
}

// Whether it is a float64 number for each of so many rows.
bool of_each_row(const at::Tensor& numbers, int64_t rows) {
  return numbers.device().is_cpu() && numbers.scalar_type() == at::kDouble && numbers.is_contiguous() && numbers.numel() == rows;
}

// Whether each of so many rows has one of the sources: the one of its number, where nothing says which.
bool fits(const at::Tensor* source_of_row, int64_t rows, int64_t sources) {
  return source_of_row ? places(*source_of_row, rows, sources) : rows == sources;
}

}  // namespace

extern "C" {

// Turns logits [S, V] of a target into probabilities, in place; gives their entropies [S] of float64, 0 unless asked for.
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

// Turns logits [n, V] of the drafter into probabilities, in place, and compares them with the target's, of the entropies [S]; gives `Distance`s [n, 5],
// those of the last two 0 unless `soft`. Where `source_of_row` [n] is given, each row's target is the row of this number.
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

// In place of sums [S, V], for each s the sum of those of the rows [n, V] whose number of `source_of_row` [n] is s; whether it did.
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

// Adds to each of the rows [n, V] the one of `values` [S, V] of its number of `source_of_row` [n]; whether it did.
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

// Puts gradients in place of the drafter's probabilities [n, V], by factors [n, 3] as `Factors` names them; whether it did.
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
