// One AdamW step with block-wise 8-bit state, in one pass over memory. adamw8bit.py describes the format of the state.
//
// The blocks of 256 elements are independent of each other, so the results do not depend on the number of threads. The
// compiler can vectorize the loops; -fno-math-errno allows it to vectorize std::sqrt. Without -ffast-math it does not
// reorder arithmetic, so scaling a gradient here gives the same bits as scaling it in a separate pass.
#include <cmath>

#include "half.hpp"

namespace {

constexpr long BLOCK = 256;
constexpr int LEAST = 2;  // smallest code of u
constexpr float NOTHING = 1e-30f;  // a block whose largest magnitude is at most this gets the smallest codes

// Scalars of the update, in the order of `Rule` and `Reading` in Python.
struct Rule {
    float rate, keep, beta1, rest1, beta2, rest2, eps, widened, unscale, limit, clip;
};

struct State {
    int8_t *m;
    uint8_t *u;
    float *m_top, *u_top;  // largest magnitude of each block
};

// fp32 weights `p`, and their 16-bit copy `rounded`, which is updated too. `rounded` is null if there is no copy.
template <class W>
struct Whole {
    float *p;
    W *rounded;

    float *read(long at, float *, int) const { return p + at; }
    void write(long at, const float *from, int n) const {
        if (rounded) narrow(from, rounded + at, n);
    }
};

// fp32 weights that are stored in two 16-bit halves (step/fp32_halves.py).
struct Halves {
    Upper *upper;
    int16_t *rest;

    float *read(long at, float *to, int n) const {
        for (int i = 0; i < n; i++) to[i] = upper[at + i].with(rest[at + i]);
        return to;
    }
    void write(long at, const float *from, int n) const {
        narrow(from, upper + at, n);
        for (int i = 0; i < n; i++) rest[at + i] = int16_t(bits(from[i]));
    }
};

template <class G>
void block(float *p, const G *g, const State s, int n, const Rule &r) {
    float m[BLOCK], u[BLOCK], t[BLOCK];
    const float m_unit = *s.m_top / (127 * 127), u_unit = *s.u_top / (255 * 255);
    uint32_t m_top = 0, u_top = 0;  // maxima as bit patterns: the bits of positive floats sort like the floats
    widen(g, t, n);
    for (int i = 0; i < n; i++) {
        float x = t[i] * r.unscale;
        x = x < -r.limit ? -r.limit : x > r.limit ? r.limit : x;
        x = x * r.clip;
        const float a = float(s.m[i]), b = float(s.u[i]);
        const float old = b * b * u_unit;
        m[i] = r.beta1 * (a * std::fabs(a) * m_unit) + r.rest1 * x;
        u[i] = std::sqrt(r.beta2 * (old * old) + r.rest2 * (x * x));
        p[i] = p[i] * r.keep - r.rate * (m[i] / (u[i] * r.widened + r.eps));
        const uint32_t m_size = bits(m[i]) & 0x7fffffffu, u_size = bits(u[i]);
        m_top = m_size > m_top ? m_size : m_top;
        u_top = u_size > u_top ? u_size : u_top;
    }
    *s.m_top = real(m_top);
    *s.u_top = real(u_top);
    const float m_inverse = *s.m_top > NOTHING ? 127.0f * 127.0f / *s.m_top : 0.0f;
    const float u_inverse = *s.u_top > NOTHING ? 255.0f * 255.0f / *s.u_top : 0.0f;
    for (int i = 0; i < n; i++) {
        const int a = int(std::sqrt(std::fabs(m[i]) * m_inverse) + 0.5f);
        const int b = int(std::sqrt(u[i] * u_inverse) + 0.5f);
        s.m[i] = int8_t(m[i] < 0 ? -a : a);
        s.u[i] = uint8_t(b > LEAST ? b : LEAST);
    }
}

template <class G, class W>
void block(const W &weights, const G *g, const State s, long at, int n, const Rule &r) {
    float scratch[BLOCK];
    float *p = weights.read(at, scratch, n);
    block(p, g + at, s, n, r);
    weights.write(at, p, n);
}

template <class G, class W>
void step(const W &weights, const void *gradient, const State s, long n, const Rule &r, int threads) {
    const G *g = static_cast<const G *>(gradient);
    const long blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < blocks; b++) {
        const long at = b * BLOCK;
        const State here = {s.m + at, s.u + at, s.m_top + b, s.u_top + b};
        if (n - at >= BLOCK)
            block(weights, g, here, at, BLOCK, r);  // a constant length, so the vectorized loops have no remainder
        else
            block(weights, g, here, at, int(n - at), r);
    }
}

template <class W>
void step(const W &weights, const void *g, int dtype, const State s, long n, const Rule &r, int threads) {
    if (dtype == 0)
        step<Float32>(weights, g, s, n, r, threads);
    else if (dtype == 1)
        step<BFloat16>(weights, g, s, n, r, threads);
    else
        step<Float16>(weights, g, s, n, r, threads);
}

}  // namespace

// dtypes: 0 fp32, 1 bf16, 2 fp16. If `rest` is null, the weights are `p` (fp32), and `rounded` receives the updated
// weights in 16 bits unless it is null. If `rest` is not null, the weights are the halves `rounded` and `rest`.
extern "C" void adamw8bit(float *p, const void *gradient, int gradient_dtype, int8_t *m, uint8_t *u, float *m_top,
                          float *u_top, void *rounded, int rounded_dtype, int16_t *rest, long n, const float *rule,
                          int threads) {
    const State s = {m, u, m_top, u_top};
    Rule r;
    std::memcpy(&r, rule, sizeof r);
    Upper *upper = static_cast<Upper *>(rounded);
    if (rest)
        step(Halves{upper, rest}, gradient, gradient_dtype, s, n, r, threads);
    else if (rounded_dtype == 2)
        step(Whole<Float16>{p, static_cast<Float16 *>(rounded)}, gradient, gradient_dtype, s, n, r, threads);
    else
        step(Whole<Upper>{p, upper}, gradient, gradient_dtype, s, n, r, threads);
}
