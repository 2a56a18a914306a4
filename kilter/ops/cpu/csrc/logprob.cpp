// Log-softmax over the vocabulary, whole or at one target per row, its gradient, and argmax.
//
// A row's sum of exponentials is cut into chunks, a power of two that is given (it depends on the
// vocabulary alone). A chunk's sum about the row's maximum is taken in fixed lanes, and the
// chunks' sums are added in order in double: whoever holds whole chunks can compute their sums.
// Threads take runs of kTask elements, which are whole chunks too.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"
#include "simd.h"

struct KtLogprobArgs {
  const float* logits;     // [rows, vocab], rows stride apart
  const int64_t* targets;  // kt_token_logprobs: [rows]
  float* out;              // [rows, vocab], or [rows]
  float* lse;              // null, or [rows]: log of the sum of exponentials
  int32_t* status;         // set to 1 for a target outside the vocabulary
  int64_t rows, vocab, stride, chunk;
};

struct KtChunkSumsArgs {
  const float* logits;  // [rows, vocab], rows stride apart
  const float* top;     // [rows]
  float* sums;          // [rows, chunks]
  int64_t rows, vocab, stride, chunk;
};

struct KtLogprobsFromSumsArgs {
  const float *chosen, *top;  // [rows]
  const float* sums;          // [rows, chunks]
  float *out, *lse;           // [rows]
  int64_t rows, chunks;
};

struct KtLogprobGradArgs {
  const float* logits;     // [rows, vocab], rows stride apart
  const float* lse;        // [rows]
  const int64_t* targets;  // [rows]; one outside the vocabulary is somebody else's
  const float* grad;       // [rows]
  float* out;              // [rows, vocab], rows out_stride apart; may be the logits
  int64_t rows, vocab, stride, out_stride;
};

struct KtArgmaxArgs {
  const float* logits;  // [rows, vocab], rows stride apart
  int64_t* out;         // [rows]
  int64_t rows, vocab, stride;
};

namespace kt {
namespace {

constexpr long kTask = 4096;

long tasks(long vocab) { return (vocab + kTask - 1) / kTask; }

float run_max(const float* x, long n) {
  f32x16 m = set1(-INFINITY);
  long i = 0;
  for (; i + 16 <= n; i += 16) m = max(m, load(x + i));
  if (i < n) m = max(m, load_n(x + i, n - i, -INFINITY));
  return reduce_max(m);
}

float chunk_sum(const float* x, long n, float row_max) {
  const f32x16 shift = set1(row_max);
  f32x16 sum[2] = {zero(), zero()};
  long i = 0;
  for (; i + 32 <= n; i += 32) {
    sum[0] = sum[0] + exp_down(load(x + i) - shift);
    sum[1] = sum[1] + exp_down(load(x + i + 16) - shift);
  }
  for (int j = 0; i < n; i += 16, ++j) {
    f32x16 e = exp_down(load_n(x + i, n - i) - shift);
    float t[16];
    store(t, e);
    for (long k = n - i; k < 16; ++k) t[k] = 0.0f;
    sum[j] = sum[j] + load(t);
  }
  return reduce_add(sum[0] + sum[1]);
}

void row_tops(const KtLogprobArgs* a, float* top) {
  const long runs = tasks(a->vocab);
  thread_local std::vector<float> part;
  part.resize(a->rows * runs);
  float* p = part.data();
  parallel_for(a->rows * runs, [=](long task, int) {
    const long t = task / runs, start = task % runs * kTask;
    p[task] = run_max(a->logits + t * a->stride + start, std::min(kTask, a->vocab - start));
  });
  for (long t = 0; t < a->rows; ++t) top[t] = *std::max_element(p + t * runs, p + (t + 1) * runs);
}

void chunk_sums(const KtChunkSumsArgs& a) {
  const long runs = tasks(a.vocab), chunks = (a.vocab + a.chunk - 1) / a.chunk;
  parallel_for(a.rows * runs, [&](long task, int) {
    const long t = task / runs, start = task % runs * kTask;
    const long end = std::min(start + kTask, long(a.vocab));
    const float* x = a.logits + t * a.stride;
    float* sums = a.sums + t * chunks;
    for (long i = start; i < end; i += a.chunk)
      sums[i / a.chunk] = chunk_sum(x + i, std::min(long(a.chunk), end - i), a.top[t]);
  });
}

double log_sum_exp(const float* sums, long chunks, float top) {
  double sum = 0.0;
  for (long c = 0; c < chunks; ++c) sum += double(sums[c]);
  return double(top) + std::log(sum);
}

// Log of the sum of exponentials of every row.
void log_sum_exp(const KtLogprobArgs* a, std::vector<double>& lse) {
  const long chunks = (a->vocab + a->chunk - 1) / a->chunk;
  thread_local std::vector<float> sums, top;
  sums.resize(a->rows * chunks);
  top.resize(a->rows);
  row_tops(a, top.data());
  chunk_sums({a->logits, top.data(), sums.data(), a->rows, a->vocab, a->stride, a->chunk});
  lse.resize(a->rows);
  for (long t = 0; t < a->rows; ++t)
    lse[t] = log_sum_exp(sums.data() + t * chunks, chunks, top[t]);
}

// First index of the largest element; a NaN is larger than everything, as torch has it.
long run_argmax(const float* x, long n) {
  const float m = run_max(x, n);
  for (long i = 0; i < n; ++i)
    if (x[i] == m || std::isnan(x[i])) {
      if (std::isnan(x[i])) return i;
      for (long j = i + 1; j < n; ++j)
        if (std::isnan(x[j])) return j;
      return i;
    }
  return 0;
}

}  // namespace
}  // namespace kt

extern "C" void kt_log_softmax(const KtLogprobArgs* a) {
  using namespace kt;
  thread_local std::vector<double> lse;
  log_sum_exp(a, lse);
  const double* shift = lse.data();
  const long runs = tasks(a->vocab);
  parallel_for(a->rows * runs, [=](long task, int) {
    const long t = task / runs, start = task % runs * kTask;
    const long n = std::min<long>(kTask, a->vocab - start);
    const float* x = a->logits + t * a->stride + start;
    float* out = a->out + t * a->vocab + start;
    for (long i = 0; i < n; ++i) out[i] = float(double(x[i]) - shift[t]);
  });
}

extern "C" void kt_token_logprobs(const KtLogprobArgs* a) {
  using namespace kt;
  thread_local std::vector<double> lse;
  log_sum_exp(a, lse);
  for (long t = 0; t < a->rows; ++t) {
    const int64_t target = a->targets[t];
    if (a->lse) a->lse[t] = float(lse[t]);
    if (target < 0 || target >= a->vocab) {
      *a->status = 1;
      a->out[t] = NAN;
    } else {
      a->out[t] = float(double(a->logits[t * a->stride + target]) - lse[t]);
    }
  }
}

extern "C" void kt_chunk_sums(const KtChunkSumsArgs* a) { kt::chunk_sums(*a); }

extern "C" void kt_logprobs_from_sums(const KtLogprobsFromSumsArgs* a) {
  for (long t = 0; t < a->rows; ++t) {
    const double lse = kt::log_sum_exp(a->sums + t * a->chunks, a->chunks, a->top[t]);
    a->lse[t] = float(lse);
    a->out[t] = float(double(a->chosen[t]) - lse);
  }
}

// out = grad * (one-hot(target) - softmax).
extern "C" void kt_logprob_grad(const KtLogprobGradArgs* a) {
  using namespace kt;
  const long runs = tasks(a->vocab);
  parallel_for(a->rows * runs, [=](long task, int) {
    const long t = task / runs, start = task % runs * kTask;
    const long n = std::min<long>(kTask, a->vocab - start);
    const float* x = a->logits + t * a->stride + start;
    float* out = a->out + t * a->out_stride + start;
    const f32x16 lse = set1(a->lse[t]), factor = set1(-a->grad[t]);
    for (long i = 0; i < n; i += 16)
      store_n(out + i, n - i, exp_down(load_n(x + i, n - i) - lse) * factor);
    const long target = a->targets[t] - start;
    if (target >= 0 && target < n) out[target] += a->grad[t];
  });
}

extern "C" void kt_argmax(const KtArgmaxArgs* a) {
  using namespace kt;
  const long runs = tasks(a->vocab);
  thread_local std::vector<long> best;
  best.resize(a->rows * runs);
  long* b = best.data();
  parallel_for(a->rows * runs, [=](long task, int) {
    const long start = task % runs * kTask;
    const float* x = a->logits + task / runs * a->stride + start;
    b[task] = start + run_argmax(x, std::min<long>(kTask, a->vocab - start));
  });
  for (long t = 0; t < a->rows; ++t) {
    const float* x = a->logits + t * a->stride;
    long top = b[t * runs];
    for (long r = 1; r < runs; ++r) {
      const long i = b[t * runs + r];
      if (!std::isnan(x[top]) && (std::isnan(x[i]) || x[i] > x[top])) top = i;
    }
    a->out[t] = top;
  }
}
