// The rule for LDS (simgpu/rules.py, shared_load) as the plain loop one would write in C: lane by lane, a
// list of the distinct words each bank is asked for. The benchmark's yardstick; nothing else uses it.
// cc -O3 -march=native -shared -fPIC lds_rule.c -o lds_rule.so
#include <stdint.h>
#include <string.h>

enum { LANES = 32, BANKS = 32, WORD = 4, ROW = WORD * BANKS };

// Whether every active lane finds the lane at distance step inactive or at its own address.
static int pairs_agree(const int32_t *address, uint32_t mask, int step) {
    for (int lane = 0; lane < LANES; lane++) {
        int other = lane ^ step;
        if ((mask >> lane & 1) && (mask >> other & 1) && address[lane] != address[other]) return 0;
    }
    return 1;
}

// Most distinct vectors of `width` bytes that any bank is asked for by the active lanes first..last-1. An
// aligned vector covers whole banks, so the 128-byte row counts as 128 / width wide banks.
static int conflict_degree(const int32_t *address, uint32_t mask, int first, int last, int width) {
    int32_t vectors[BANKS][LANES];
    uint8_t count[BANKS];
    int worst = 0;
    memset(count, 0, sizeof count);
    for (int lane = first; lane < last; lane++) {
        if (!(mask >> lane & 1)) continue;
        uint32_t vector = (uint32_t)address[lane] / (uint32_t)width;
        uint32_t bank = vector % (uint32_t)(ROW / width);
        int seen = 0;
        while (seen < count[bank] && vectors[bank][seen] != (int32_t)vector) seen++;
        if (seen < count[bank]) continue;
        vectors[bank][count[bank]++] = (int32_t)vector;
        if (count[bank] > worst) worst = count[bank];
    }
    return worst;
}

static inline int64_t sum(int64_t n, const uint32_t *mask, const int32_t *address, int width, int64_t *ideal) {
    int64_t wavefronts = 0;
    for (int64_t i = 0; i < n; i++, address += LANES) {
        int group = ROW / width;
        for (int lane = 0; lane < LANES; lane++)
            if ((mask[i] >> lane & 1) && (address[lane] < 0 || address[lane] % width)) return -1 - i;
        if (width > WORD && (pairs_agree(address, mask[i], 1) || pairs_agree(address, mask[i], 2))) group *= 2;
        for (int first = 0; first < LANES; first += group) {
            int degree = conflict_degree(address, mask[i], first, first + group, width);
            wavefronts += degree;
            *ideal += degree > 0;
        }
    }
    return wavefronts;
}

// Total wavefronts of n warp accesses of 4 or 16 bytes per lane (address: n rows of 32), or -1 - i where
// access i has a misaligned or negative active address. A constant width lets the compiler fold it.
int64_t lds_wavefronts(int64_t n, const uint32_t *mask, const int32_t *address, int width, int64_t *ideal) {
    *ideal = 0;
    return width == 4 ? sum(n, mask, address, 4, ideal) : width == 16 ? sum(n, mask, address, 16, ideal) : -1;
}
