// One AdamW step with block-wise 8-bit state, in one pass over memory: see adamw8bit.py for the format.
//
// Every block of 256 elements is independent, so the bits do not depend on the number of threads. The loops are written
// for the compiler to vectorise; -fno-math-errno lets it vectorise std::sqrt. Nothing is reordered (no -ffast-math):
// a gradient that is scaled here is the gradient that was scaled before.
#include <cmath>

#include "half.hpp"

namespace {

constexpr long BLOCK = 256;
constexpr int LEAST = 2;  // code of u

// In the order of `_rule` in adamw8bit.py.
struct Rule {
    float rate, keep, beta1, rest1, beta2, rest2, eps, widened, unscale, limit, clip;
};

struct State {
    int8_t *m;
    uint8_t *u;
    float *m_top, *u_top;  // of each block
};

template <class G, class W>
void block(float *p, const G *g, const State s, W *out, int n, const Rule &r) {
    float m[BLOCK], u[BLOCK], t[BLOCK];
    const float m_unit = *s.m_top / (127 * 127), u_unit = *s.u_top / (255 * 255);
    uint32_t m_top = 0, u_top = 0;  // of positive numbers: their bits have their order
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
    const float m_inverse = m_top ? 127.0f * 127.0f / *s.m_top : 0.0f;
    const float u_inverse = u_top ? 255.0f * 255.0f / *s.u_top : 0.0f;
    for (int i = 0; i < n; i++) {
        const int a = int(std::sqrt(std::fabs(m[i]) * m_inverse) + 0.5f);
        const int b = int(std::sqrt(u[i] * u_inverse) + 0.5f);
        s.m[i] = int8_t(m[i] < 0 ? -a : a);
        s.u[i] = uint8_t(b > LEAST ? b : LEAST);
    }
    if (out) narrow(p, out, n);
}

template <class G, class W>
void step(float *p, const void *gradient, const State s, void *rounded, long n, const Rule &r, int threads) {
    const G *g = static_cast<const G *>(gradient);
    W *out = static_cast<W *>(rounded);
    const long blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < blocks; b++) {
        const long at = b * BLOCK;
        const State here = {s.m + at, s.u + at, s.m_top + b, s.u_top + b};
        W *to = out ? out + at : nullptr;
        if (n - at >= BLOCK)
            block<G, W>(p + at, g + at, here, to, BLOCK, r);  // a constant: the loops have no tails
        else
            block<G, W>(p + at, g + at, here, to, int(n - at), r);
    }
}

template <class G>
void step(int out, float *p, const void *g, const State s, void *rounded, long n, const Rule &r, int threads) {
    if (out == 2)
        step<G, Float16>(p, g, s, rounded, n, r, threads);
    else
        step<G, BFloat16>(p, g, s, rounded, n, r, threads);
}

}  // namespace

// dtypes: 0 fp32, 1 bf16, 2 fp16; `rounded` is null where nobody wants the new weights in 16 bits.
extern "C" void adamw8bit(float *p, const void *gradient, int gradient_dtype, int8_t *m, uint8_t *u, float *m_top,
                          float *u_top, void *rounded, int rounded_dtype, long n, const float *rule, int threads) {
    const State s = {m, u, m_top, u_top};
    Rule r;
    std::memcpy(&r, rule, sizeof r);
    if (gradient_dtype == 0)
        step<Float32>(rounded_dtype, p, gradient, s, rounded, n, r, threads);
    else if (gradient_dtype == 1)
        step<BFloat16>(rounded_dtype, p, gradient, s, rounded, n, r, threads);
    else
        step<Float16>(rounded_dtype, p, gradient, s, rounded, n, r, threads);
}
