// One step of bitsandbytes' block-wise 8-bit Adam or Lion, in one pass over memory. See bitsandbytes_cpu.py.
//
// The arithmetic operations and their order are those of the torch operators with which bitsandbytes computes a step.
// std::fma is used where the torch operators use a fused multiply-add, and -ffp-contract=off prevents all other fused
// multiply-adds. Each element is rounded to the nearest code, which bitsandbytes' CPU code does not do.
#include <algorithm>
#include <cmath>

#include "half.hpp"

namespace {

constexpr long BLOCK = 256;

// Scalars of the update, in the order of `_rule` in bitsandbytes_cpu.py.
struct Rule {
    float beta1, rest1, beta2, rest2, eps, rate, widened, keep;
};

// The 256 values of a scale, increasing in [-1, 1], and a table to find the value that is nearest to a number x. A cell
// of the table covers the numbers that agree in sign, exponent and upper bits of the mantissa. Cells are so narrow that
// only one or two of the 256 values can be nearest to the numbers of a cell. The table has 32-bit integers, because
// vector instructions can gather them. The tables of both scales fit in a CPU's first-level cache.
template <bool SIGNED>
struct Scale {
    // Number of lower mantissa bits in which the numbers of a cell differ. The unsigned scale has twice as many
    // positive values as the signed scale, so its cells are half as wide.
    static constexpr int SHIFT = SIGNED ? 17 : 16;
    // EXPONENT: cells per exponent. The cells range from 2^-24 to 2; cell 0 also contains all smaller numbers.
    static constexpr int EXPONENT = 1 << (23 - SHIFT), LOWEST = (127 - 24) * EXPONENT, CELLS = 25 * EXPONENT;
    float value[257];
    // for each cell, the lower of the two codes that may be nearest; first for the cells of positive x, then of
    // negative x
    int32_t lower[(SIGNED + 1) * CELLS];

    explicit Scale(const float *of) {
        std::memcpy(value, of, 256 * sizeof *of);
        value[256] = INFINITY;  // a sentinel, which is never nearer
        int above = 0, below = 255;
        for (int cell = 0; cell < CELLS; cell++) {
            const float from = cell ? real(uint32_t(cell + LOWEST) << SHIFT) : 0.0f;
            const float to = -real(uint32_t(cell + LOWEST + 1) << SHIFT);
            while (nearer(above, from)) above++;
            while (below > 0 && !nearer(below - 1, to)) below--;
            lower[cell] = above;
            if (SIGNED) lower[cell + CELLS] = below;
        }
    }

    // Returns true if the value of the next code is nearer to x than the value of `code`; false in a tie.
    bool nearer(int code, float x) const {
        return std::fabs(x - value[code]) > std::fabs(value[code + 1] - x);
    }

    void read(const uint8_t *codes, float top, float *to, int n) const {
        for (int i = 0; i < n; i++) to[i] = value[codes[i]] * top;
    }

    float write(const float *from, uint8_t *codes, int n) const {
        uint32_t largest = 0;  // maximum as a bit pattern: the bits of positive floats sort like the floats
        for (int i = 0; i < n; i++) largest = std::max(largest, bits(from[i]) & 0x7fffffffu);
        const float top = real(largest), divisor = largest ? top : 1.0f;  // a block of zeros is divided by 1
        int32_t nearest[BLOCK];
        for (int i = 0; i < n; i++) {
            const float x = from[i] / divisor;
            const int key = int((bits(x) & 0x7fffffffu) >> SHIFT) - LOWEST, cell = key < 0 ? 0 : key;  // |x| <= 1
            const int code = lower[SIGNED && x < 0 ? cell + CELLS : cell];
            nearest[i] = nearer(code, x) ? code + 1 : code;
        }
        for (int i = 0; i < n; i++) codes[i] = uint8_t(nearest[i]);
        return top;
    }
};

struct State {
    uint8_t *codes;
    float *tops;  // the largest magnitude of each block
    State at(long block) const { return {codes + block * BLOCK, tops + block}; }
};

void adam(float *p, const float *g, float *m, float *v, int n, const Rule &r) {
    for (int i = 0; i < n; i++) {
        m[i] = std::fma(g[i], r.rest1, m[i] * r.beta1);
        v[i] = std::fma(r.rest2 * g[i], g[i], v[i] * r.beta2);
        const float denominator = std::sqrt(v[i]) / r.widened + r.eps;
        p[i] = p[i] * r.keep + -r.rate * m[i] / denominator;
    }
}

void lion(float *p, const float *g, float *m, int n, const Rule &r) {
    for (int i = 0; i < n; i++) {
        const float direction = m[i] * r.beta1 + g[i] * r.rest1;
        p[i] = std::fma(float((direction > 0) - (direction < 0)), -r.rate, p[i] * r.keep);
        m[i] = std::fma(g[i], r.rest2, m[i] * r.beta2);
    }
}

template <class T>
void step(T *p, const T *g, const State first, const Scale<true> &one, const State second, const Scale<false> *two,
          long n, const Rule &r, int threads) {
    const long blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long b = 0; b < blocks; b++) {
        const int count = int(std::min(n - b * BLOCK, BLOCK));
        const State s = first.at(b), t = two ? second.at(b) : s;
        float weights[BLOCK], gradients[BLOCK], m[BLOCK], v[BLOCK];
        widen(p + b * BLOCK, weights, count);
        widen(g + b * BLOCK, gradients, count);
        one.read(s.codes, *s.tops, m, count);
        if (two) {
            two->read(t.codes, *t.tops, v, count);
            adam(weights, gradients, m, v, count, r);
            *t.tops = two->write(v, t.codes, count);
        } else {
            lion(weights, gradients, m, count, r);
        }
        *s.tops = one.write(m, s.codes, count);
        narrow(weights, p + b * BLOCK, count);
    }
}

}  // namespace

// dtype: dtype of p and g: 0 fp32, 1 bf16, 2 fp16. Computes Lion's step if the second moment (codes2) is null,
// otherwise Adam's step.
extern "C" void blockwise(void *p, const void *g, int dtype, uint8_t *codes1, float *tops1, const float *scale1,
                          uint8_t *codes2, float *tops2, const float *scale2, long n, const float *rule, int threads) {
    const State first = {codes1, tops1}, second = {codes2, tops2};
    const Scale<true> one(scale1);
    const Scale<false> two(codes2 ? scale2 : scale1), *other = codes2 ? &two : nullptr;
    Rule r;
    std::memcpy(&r, rule, sizeof r);
    if (dtype == 0)
        step((Float32 *)p, (const Float32 *)g, first, one, second, other, n, r, threads);
    else if (dtype == 1)
        step((BFloat16 *)p, (const BFloat16 *)g, first, one, second, other, n, r, threads);
    else
        step((Float16 *)p, (const Float16 *)g, first, one, second, other, n, r, threads);
}
