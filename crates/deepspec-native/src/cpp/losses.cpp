// What losses ask of rows of logits, in one to three passes over a row; libtorch makes them of a dozen operators, which go over all rows once each.
// What can fail (there is no memory for a result, or for tasks) does so before the first row is written.

namespace {

// As many sums side by side as keep a processor's vectors busy, in an order that is the same on every machine.
constexpr int64_t kSums = 4 * kLanes;

inline float added(float* sums) {
  for (int64_t half = kSums / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

// Turns a row into e^x / Σ e^x, and gives its largest value, and log Σ e^(x - that).
DEEPSPEC_VECTORS void normalise(float* x, int64_t width, float* found) {
  float most[kSums], sums[kSums] = {};
  for (float& lane : most) lane = kLowest;
  int64_t i = 0;
  for (; i + kSums <= width; i += kSums)
    for (int64_t lane = 0; lane < kSums; ++lane) most[lane] = x[i + lane] > most[lane] ? x[i + lane] : most[lane];
  for (; i < width; ++i) most[0] = x[i] > most[0] ? x[i] : most[0];
  for (int64_t lane = 1; lane < kSums; ++lane) most[0] = most[lane] > most[0] ? most[lane] : most[0];
  const float highest = most[0];
  for (i = 0; i + kSums <= width; i += kSums)
    for (int64_t lane = 0; lane < kSums; ++lane) {
      const float weight = exponential(x[i + lane] - highest);
      x[i + lane] = weight;
      sums[lane] += weight;
    }
  for (; i < width; ++i) {
    x[i] = exponential(x[i] - highest);
    sums[0] += x[i];
  }
  const float sum = added(sums), factor = 1.0f / sum;
  for (i = 0; i < width; ++i) x[i] *= factor;
  found[0] = highest;
  found[1] = std::log(sum);
}

inline float sign(float x) { return static_cast<float>(x > 0.0f) - static_cast<float>(x < 0.0f); }

// Σ |p - q|, and Σ p sign(p - q).
DEEPSPEC_VECTORS void differ(const float* p, const float* q, int64_t width, float* found) {
  float sums[kSums] = {}, signed_sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums <= width; i += kSums)
    for (int64_t lane = 0; lane < kSums; ++lane) {
      const float difference = p[i + lane] - q[i + lane];
      sums[lane] += difference < 0.0f ? -difference : difference;
      signed_sums[lane] += p[i + lane] * sign(difference);
    }
  for (; i < width; ++i) {
    const float difference = p[i] - q[i];
    sums[0] += difference < 0.0f ? -difference : difference;
    signed_sums[0] += p[i] * sign(difference);
  }
  found[0] = added(sums);
  found[1] = added(signed_sums);
}

// p (rise sign(p - q) + factor) in place of p.
DEEPSPEC_VECTORS void tilt(float* p, const float* q, int64_t width, float rise, float factor) {
  for (int64_t i = 0; i < width; ++i) p[i] *= rise * sign(p[i] - q[i]) + factor;
}

bool rows_alike(const at::Tensor& a, const at::Tensor& b) {
  return plain(a) && plain(b) && a.dim() == 2 && a.numel() > 0 && a.sizes() == b.sizes();
}

bool one_each(const at::Tensor& of_row, const at::Tensor& x) { return plain(of_row) && of_row.numel() == x.size(0); }

}  // namespace

extern "C" {

// e^x / Σ e^x in place of the rows x [n, V]: [n, 2], the largest value of each and log Σ e^(x - that).
at::Tensor* ds_normalise_rows(at::Tensor* x) {
  return made([&]() -> at::Tensor {
    if (!plain(*x) || x->dim() != 2 || x->numel() == 0) return {};
    RECORD_USER_SCOPE("normalise_rows");
    const int64_t width = x->size(1);
    at::Tensor found = at::empty({x->size(0), 2}, x->options());
    float *row = x->mutable_data_ptr<float>(), *to = found.mutable_data_ptr<float>();
    for_rows(*x, width, [=](int64_t i) { normalise(row + i * width, width, to + 2 * i); });
    return found;
  });
}

// Of the rows p and q [n, V]: [n, 2], Σ |p - q| and Σ p sign(p - q).
at::Tensor* ds_row_differences(const at::Tensor* p, const at::Tensor* q) {
  return made([&]() -> at::Tensor {
    if (!rows_alike(*p, *q)) return {};
    RECORD_USER_SCOPE("row_differences");
    const int64_t width = p->size(1);
    at::Tensor found = at::empty({p->size(0), 2}, p->options());
    const float *first = p->const_data_ptr<float>(), *second = q->const_data_ptr<float>();
    float* to = found.mutable_data_ptr<float>();
    for_rows(*p, width, [=](int64_t i) { differ(first + i * width, second + i * width, width, to + 2 * i); });
    return found;
  });
}

// p (rise sign(p - q) + factor) in place of the rows p [n, V]; rise and factor [n, 1]. 1 where that was done.
int32_t ds_tilt_rows(at::Tensor* p, const at::Tensor* q, const at::Tensor* rise, const at::Tensor* factor) {
  try {
    if (!rows_alike(*p, *q) || !one_each(*rise, *p) || !one_each(*factor, *p)) return 0;
    RECORD_USER_SCOPE("tilt_rows");
    const int64_t width = p->size(1);
    float* first = p->mutable_data_ptr<float>();
    const float *second = q->const_data_ptr<float>(), *rises = rise->const_data_ptr<float>(),
                *factors = factor->const_data_ptr<float>();
    for_rows(*p, width, [=](int64_t i) { tilt(first + i * width, second + i * width, width, rises[i], factors[i]); });
    return 1;
  } catch (...) {
    return 0;
  }
}
}
