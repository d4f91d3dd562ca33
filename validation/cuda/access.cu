// One warp, one memory instruction per row of addresses: what does each row cost?
//
//     access BATCH        (validation/access.py writes the batch, profiles this program and reads the profile)
//
// A launch takes ROWS rows; a row is an active mask and the addresses of 32 lanes. Each row is an instruction
// of its own in the unrolled kernel, so a profiler that attributes counters to instructions measures 64 rows
// per launch; built with -DROWS=1, a launch is one access, for counters that only count whole launches. The
// rows lie in constant memory: reading them is neither shared nor global traffic. Row k owns bytes
// [k*REGION, (k+1)*REGION) of global memory, so that no row finds its lines cached by an earlier one.
// Every row checks that it moved the right data; the program exits 1 and names the rows that did not. Built
// with -DUNCHECKED, a cp.async is not read back and no verdict stored: in a kernel that does, Nsight Compute
// 2025.3.1 reported 0 for the counters of cp.async.cg.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define HAS_STMATRIX (__CUDA_ARCH_LIST__ >= 900)
#ifndef ROWS
#define ROWS 64  // rows of a launch, at most 64
#endif
constexpr int LANES = 32;
constexpr uint32_t REGION = 256 << 10, TILE = 64 << 10;  // bytes of global memory per row, of shared memory

struct Row {
    uint32_t mask, shared[LANES], global_[LANES], bytes[LANES];
};
__constant__ Row rows[ROWS];

#define CUDA(call)                                                                          \
    do {                                                                                    \
        cudaError_t e = (call);                                                             \
        if (e != cudaSuccess) { fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(e)); exit(1); } \
    } while (0)

// ---- what memory holds ------------------------------------------------------------------------------------

// The word at a byte offset is a hash of the offset, so a lane can tell any word from any other.
__host__ __device__ inline uint32_t word(uint32_t offset, uint32_t salt) {
    uint32_t h = (offset / 4 + 1) * 2654435761u ^ salt * 0x9e3779b9u;
    return h ^ h >> 15;
}

template <int W>
struct Vector {  // the W bytes of one lane, in the low bytes of w[0] where W < 4
    uint32_t w[W < 4 ? 1 : W / 4];
    __device__ bool operator!=(const Vector& other) const {
        bool differs = false;
        for (int i = 0; i < (W < 4 ? 1 : W / 4); ++i) differs |= w[i] != other.w[i];
        return differs;
    }
};

template <int W>
__device__ Vector<W> contents(uint32_t offset, uint32_t salt) {
    Vector<W> v;
    if (W < 4) {
        v.w[0] = word(offset, salt) >> 8 * (offset % 4) & ((1u << 8 * W % 32) - 1);
    } else {
        for (int i = 0; i < W / 4; ++i) v.w[i] = word(offset + 4 * i, salt);
    }
    return v;
}

struct Site {  // one row, seen by one lane
    uint32_t shared, shared_offset;
    char* global_;
    uint32_t global_offset;
    int row;
};

__device__ uint32_t lane() { return threadIdx.x; }

// ---- plain loads and stores -------------------------------------------------------------------------------

#define LOAD(SPACE, A, W, FORM, C, ...)                                                                      \
    template <> __device__ Vector<W> load##SPACE<W>(A at) {                                                  \
        Vector<W> v; asm volatile("ld." FORM : __VA_ARGS__ : C(at) : "memory"); return v;           \
    }
#define STORE(SPACE, A, W, FORM, C, ...)                                                                     \
    template <> __device__ void store##SPACE<W>(A at, Vector<W> v) {                                         \
        asm volatile("st." FORM ::C(at), __VA_ARGS__ : "memory");                                   \
    }
#define OUT4 "=r"(v.w[0]), "=r"(v.w[1]), "=r"(v.w[2]), "=r"(v.w[3])
#define IN4 "r"(v.w[0]), "r"(v.w[1]), "r"(v.w[2]), "r"(v.w[3])
#define WIDTHS(SPACE, A, NAME, C)                                                                            \
    template <int W> __device__ Vector<W> load##SPACE(A at);                                                 \
    template <int W> __device__ void store##SPACE(A at, Vector<W> v);                                        \
    LOAD(SPACE, A, 1, NAME ".u8 %0, [%1];", C, "=r"(v.w[0]))                                                 \
    LOAD(SPACE, A, 2, NAME ".u16 %0, [%1];", C, "=r"(v.w[0]))                                                \
    LOAD(SPACE, A, 4, NAME ".u32 %0, [%1];", C, "=r"(v.w[0]))                                                \
    LOAD(SPACE, A, 8, NAME ".v2.u32 {%0, %1}, [%2];", C, "=r"(v.w[0]), "=r"(v.w[1]))                         \
    LOAD(SPACE, A, 16, NAME ".v4.u32 {%0, %1, %2, %3}, [%4];", C, OUT4)                                      \
    STORE(SPACE, A, 1, NAME ".u8 [%0], %1;", C, "r"(v.w[0]))                                                 \
    STORE(SPACE, A, 2, NAME ".u16 [%0], %1;", C, "r"(v.w[0]))                                                \
    STORE(SPACE, A, 4, NAME ".u32 [%0], %1;", C, "r"(v.w[0]))                                                \
    STORE(SPACE, A, 8, NAME ".v2.u32 [%0], {%1, %2};", C, "r"(v.w[0]), "r"(v.w[1]))                          \
    STORE(SPACE, A, 16, NAME ".v4.u32 [%0], {%1, %2, %3, %4};", C, IN4)
WIDTHS(_shared, uint32_t, "volatile.shared", "r")
WIDTHS(_global, char*, "volatile.global", "l")
WIDTHS(_weak, char*, "global", "l")  // what a compiler emits for a plain access to global memory

// An access says whether it needs the tile filled before it, whether it writes global memory, and runs one
// row: the verdict is whether the active lane saw wrong data.
struct Access {
    static constexpr bool fills = false, writes = false;
};

template <int W>
struct Lds : Access {
    static constexpr bool fills = true;
    __device__ static bool run(const Site& at, bool on) {
        Vector<W> v{};
        if (on) v = load_shared<W>(at.shared);
        return on && v != contents<W>(at.shared_offset, 0);
    }
};

template <int W>
struct Sts : Access {
    __device__ static bool run(const Site& at, bool on) {
        if (on) store_shared<W>(at.shared, contents<W>(at.shared_offset, at.row + 1));
        __syncwarp();
        return on && load_shared<W>(at.shared) != contents<W>(at.shared_offset, at.row + 1);
    }
};

template <int W>
struct Ldg : Access {
    __device__ static bool run(const Site& at, bool on) {
        Vector<W> v{};
        if (on) v = load_weak<W>(at.global_);
        return on && v != contents<W>(at.global_offset, 0);
    }
};

template <int W>
struct Stg : Access {
    static constexpr bool writes = true;
    __device__ static bool run(const Site& at, bool on) {
        if (on) store_weak<W>(at.global_, contents<W>(at.global_offset, at.row + 1));
        __syncwarp();
        return on && load_global<W>(at.global_) != contents<W>(at.global_offset, at.row + 1);
    }
};

// ---- ldmatrix and stmatrix --------------------------------------------------------------------------------

// Register i of a lane is one word of matrix i: word lane%4 of row lane/4, or, transposed, element lane/4 of
// rows 2*(lane%4) and the next one.
template <bool TRANS>
__device__ uint32_t fragment(int row, int i, uint32_t salt) {
    const uint32_t* base = rows[row].shared + 8 * i;
    if (!TRANS) return word(base[lane() / 4] + 4 * (lane() % 4), salt);
    uint32_t column = 2 * (lane() / 4), r = 2 * (lane() % 4);
    return contents<2>(base[r] + column, salt).w[0] | contents<2>(base[r + 1] + column, salt).w[0] << 16;
}

#define MATRIX(VERB, N, T, SUFFIX, ...) \
    asm volatile(VERB ".sync.aligned.m8n8.x" #N T ".shared.b16 " SUFFIX __VA_ARGS__ : "memory")

template <int N, bool TRANS>
struct Ldmatrix : Access {
    static constexpr bool fills = true;
    __device__ static bool run(const Site& at, bool on) {
        if (!on) return false;  // all lanes are, or none
        Vector<16> v{};
        if (N == 1 && !TRANS) MATRIX("ldmatrix", 1, "", "{%0}, [%1];", : "=r"(v.w[0]) : "r"(at.shared));
        if (N == 1 && TRANS) MATRIX("ldmatrix", 1, ".trans", "{%0}, [%1];", : "=r"(v.w[0]) : "r"(at.shared));
        if (N == 2 && !TRANS)
            MATRIX("ldmatrix", 2, "", "{%0, %1}, [%2];", : "=r"(v.w[0]), "=r"(v.w[1]) : "r"(at.shared));
        if (N == 2 && TRANS)
            MATRIX("ldmatrix", 2, ".trans", "{%0, %1}, [%2];", : "=r"(v.w[0]), "=r"(v.w[1]) : "r"(at.shared));
        if (N == 4 && !TRANS) MATRIX("ldmatrix", 4, "", "{%0, %1, %2, %3}, [%4];", : OUT4 : "r"(at.shared));
        if (N == 4 && TRANS) MATRIX("ldmatrix", 4, ".trans", "{%0, %1, %2, %3}, [%4];", : OUT4 : "r"(at.shared));
        bool wrong = false;
        for (int i = 0; i < N; ++i) wrong |= v.w[i] != fragment<TRANS>(at.row, i, 0);
        return wrong;
    }
};

#if HAS_STMATRIX
template <int N, bool TRANS>
struct Stmatrix : Access {
    __device__ static bool run(const Site& at, bool on) {
        if (!on) return false;  // all lanes are, or none
        Vector<16> v{};
        for (int i = 0; i < N; ++i) v.w[i] = fragment<TRANS>(at.row, i, at.row + 1);
        if (N == 1 && !TRANS) MATRIX("stmatrix", 1, "", "[%0], {%1};", ::"r"(at.shared), "r"(v.w[0]));
        if (N == 1 && TRANS) MATRIX("stmatrix", 1, ".trans", "[%0], {%1};", ::"r"(at.shared), "r"(v.w[0]));
        if (N == 2 && !TRANS)
            MATRIX("stmatrix", 2, "", "[%0], {%1, %2};", ::"r"(at.shared), "r"(v.w[0]), "r"(v.w[1]));
        if (N == 2 && TRANS)
            MATRIX("stmatrix", 2, ".trans", "[%0], {%1, %2};", ::"r"(at.shared), "r"(v.w[0]), "r"(v.w[1]));
        if (N == 4 && !TRANS) MATRIX("stmatrix", 4, "", "[%0], {%1, %2, %3, %4};", ::"r"(at.shared), IN4);
        if (N == 4 && TRANS) MATRIX("stmatrix", 4, ".trans", "[%0], {%1, %2, %3, %4};", ::"r"(at.shared), IN4);
        __syncwarp();
        return lane() < 8 * N && load_shared<16>(at.shared) != contents<16>(at.shared_offset, at.row + 1);
    }
};
#endif

// ---- atomics ----------------------------------------------------------------------------------------------

template <class T>
__device__ T bits(Vector<sizeof(T)> v) {
    T t;
    memcpy(&t, v.w, sizeof t);
    return t;
}
template <class T>
__device__ Vector<sizeof(T)> words(T t) {
    Vector<sizeof(T)> v;
    memcpy(v.w, &t, sizeof t);
    return v;
}

// n lanes on one element, each with operand v, turn `before` into AFTER. Lanes that race to swap `before`
// agree on what they write. `old` is looked at because a result that nobody reads compiles to a RED.
#define ATOMIC(NAME, SPACE, ADDRESS, T, OPERAND, AFTER, ...)                                                 \
    struct NAME : Access {                                                                                   \
        static constexpr bool writes = #SPACE[0] == 'g';                                                     \
        __device__ static bool run(const Site& at, bool on) {                                                \
            const uint32_t slot = writes ? at.global_offset : at.shared_offset;                              \
            const int n = __popc(__match_any_sync(~0u, on ? slot : ~lane()));                                \
            const T before = T(slot % 1024 + 1024), v = T(OPERAND);                                          \
            T old = T(0);                                                                                    \
            if (on) store_##SPACE<sizeof(T)>(ADDRESS, words<T>(before));                                     \
            __threadfence();                                                                                 \
            __syncwarp();                                                                                    \
            if (on) asm volatile(__VA_ARGS__ : "memory");                                                    \
            __threadfence();                                                                                 \
            __syncwarp();                                                                                    \
            return on && (bits<T>(load_##SPACE<sizeof(T)>(ADDRESS)) != T(AFTER) || old == T(77));            \
        }                                                                                                    \
    };
#define ATOM(NAME, T, C, OPERAND, AFTER, PTX)                                                                \
    ATOMIC(NAME##Shared, shared, at.shared, T, OPERAND, AFTER,                                               \
           "atom.shared." PTX " %0, [%1], %2;" : "=" C(old) : "r"(at.shared), C(v))                          \
    ATOMIC(NAME##Global, global, at.global_, T, OPERAND, AFTER,                                              \
           "atom.global." PTX " %0, [%1], %2;" : "=" C(old) : "l"(at.global_), C(v))
#define RED(NAME, T, C, OPERAND, AFTER, PTX)                                                                 \
    ATOMIC(NAME##SharedRed, shared, at.shared, T, OPERAND, AFTER,                                            \
           "red.shared." PTX " [%0], %1;" ::"r"(at.shared), C(v))                                            \
    ATOMIC(NAME##GlobalRed, global, at.global_, T, OPERAND, AFTER,                                           \
           "red.global." PTX " [%0], %1;" ::"l"(at.global_), C(v))
#define CAS(NAME, T, C, PTX)                                                                                 \
    ATOMIC(NAME##Shared, shared, at.shared, T, before + 1, v,                                                \
           "atom.shared." PTX " %0, [%1], %2, %3;" : "=" C(old) : "r"(at.shared), C(before), C(v))           \
    ATOMIC(NAME##Global, global, at.global_, T, before + 1, v,                                               \
           "atom.global." PTX " %0, [%1], %2, %3;" : "=" C(old) : "l"(at.global_), C(before), C(v))

ATOM(AddU32, uint32_t, "r", 3, before + n * v, "add.u32")
ATOM(ExchB32, uint32_t, "r", before + 7, v, "exch.b32")
ATOM(MinU32, uint32_t, "r", before - 5, v, "min.u32")
ATOM(MaxU32, uint32_t, "r", before + 5, v, "max.u32")
ATOM(AndB32, uint32_t, "r", 0x5a5, before& v, "and.b32")
ATOM(OrB32, uint32_t, "r", 0x5a50000, before | v, "or.b32")
ATOM(XorB32, uint32_t, "r", 0x5a5, n % 2 ? before ^ v : before, "xor.b32")
ATOM(IncU32, uint32_t, "r", 1 << 20, before + n, "inc.u32")
ATOM(AddF32, float, "f", 1, before + n, "add.f32")
ATOM(AddU64, uint64_t, "l", 3, before + n * v, "add.u64")
ATOM(ExchB64, uint64_t, "l", before + 7, v, "exch.b64")
ATOM(MinU64, uint64_t, "l", before - 5, v, "min.u64")
ATOM(AddF64, double, "d", 1, before + n, "add.f64")
RED(AddU32, uint32_t, "r", 3, before + n * v, "add.u32")
RED(OrB32, uint32_t, "r", 0x5a50000, before | v, "or.b32")
RED(AddF32, float, "f", 1, before + n, "add.f32")
RED(AddU64, uint64_t, "l", 3, before + n * v, "add.u64")
RED(AddF64, double, "d", 1, before + n, "add.f64")
CAS(CasB32, uint32_t, "r", "cas.b32")
CAS(CasB64, uint64_t, "l", "cas.b64")

// ---- cp.async ---------------------------------------------------------------------------------------------

// PARTIAL: only the first `bytes` of the row come from global memory, the rest is zero-filled.
template <int W, bool PAST_L1, bool PARTIAL>
struct CpAsync : Access {
    __device__ static bool run(const Site& at, bool on) {
        const Row& row = rows[at.row];
        Vector<W> poison;
        for (uint32_t& w : poison.w) w = 0xdeadbeef;
        if (on) store_shared<W>(at.shared, poison);
        __syncwarp();
        const uint32_t bytes = PARTIAL ? row.bytes[lane()] : W;
        if (on) {
            if (PAST_L1 && PARTIAL)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at.shared), "l"(at.global_), "r"(bytes) : "memory");
            else if (PAST_L1)
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at.shared), "l"(at.global_) : "memory");
            else if (PARTIAL)
                asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at.shared), "l"(at.global_), "n"(W), "r"(bytes) : "memory");
            else
                asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at.shared), "l"(at.global_), "n"(W) : "memory");
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
#ifdef UNCHECKED
        return false;
#else
        __syncwarp();
        const Vector<W> got = load_shared<W>(at.shared);
        bool wrong = on;
#pragma unroll 1
        for (int other = 0; other < LANES; ++other) {  // lanes that share a target race: any of them may win
            if (!(row.mask >> other & 1) || row.shared[other] != at.shared_offset) continue;
            Vector<W> sent = contents<W>(row.global_[other] + at.row * REGION, 0);
            if (PARTIAL)
                for (int i = 0; i < W / 4; ++i) {
                    int keep = int(row.bytes[other]) - 4 * i;
                    sent.w[i] &= keep >= 4 ? ~0u : keep <= 0 ? 0u : (1u << 8 * keep) - 1;
                }
            wrong &= got != sent;
        }
        return wrong;
#endif
    }
};

// ---- the kernel and the instructions ----------------------------------------------------------------------

template <class A>
__global__ void access(char* memory, uint64_t* verdict) {
    extern __shared__ __align__(1024) char tile[];
    const uint32_t base = __cvta_generic_to_shared(tile);
    if (A::fills)
        for (uint32_t at = 4 * lane(); at < TILE; at += 4 * LANES) store_shared<4>(base + at, contents<4>(at, 0));
    __syncwarp();
    uint64_t wrong = 0;  // a bit per row
#pragma unroll
    for (int k = 0; k < ROWS; ++k) {
        const uint32_t s = rows[k].shared[lane()], g = rows[k].global_[lane()] + k * REGION;
        const bool bad = A::run(Site{base + s, s, memory + g, g, k}, rows[k].mask >> lane() & 1);
        wrong |= uint64_t(__any_sync(~0u, bad)) << k;
        __syncwarp();  // keeps the rows in order: without it the assembler reorders plain global loads
    }
#ifndef UNCHECKED
    if (lane() == 0) *verdict = wrong;
#endif
}

struct Kernel { const char* name; void (*run)(char*, uint64_t*); bool writes; };
#define K(NAME, ...) {NAME, access<__VA_ARGS__>, __VA_ARGS__::writes}
#define PLAIN(W) K("lds." #W, Lds<W>), K("sts." #W, Sts<W>), K("ldg." #W, Ldg<W>), K("stg." #W, Stg<W>)
#define MATRICES(VERB, A, N) K(VERB ".x" #N, A<N, false>), K(VERB ".x" #N ".trans", A<N, true>)
#define BOTH(VERB, A) K("atom.shared." VERB, A##Shared), K("atom.global." VERB, A##Global)
#define REDS(VERB, A) K("red.shared." VERB, A##SharedRed), K("red.global." VERB, A##GlobalRed)
#define COPY(CACHE, W, L1) K("cp.async." CACHE "." #W, CpAsync<W, L1, false>), \
                           K("cp.async." CACHE "." #W ".zfill", CpAsync<W, L1, true>)
const Kernel kernels[] = {
    PLAIN(1), PLAIN(2), PLAIN(4), PLAIN(8), PLAIN(16),
    MATRICES("ldmatrix", Ldmatrix, 1), MATRICES("ldmatrix", Ldmatrix, 2), MATRICES("ldmatrix", Ldmatrix, 4),
#if HAS_STMATRIX
    MATRICES("stmatrix", Stmatrix, 1), MATRICES("stmatrix", Stmatrix, 2), MATRICES("stmatrix", Stmatrix, 4),
#endif
    BOTH("add.u32", AddU32), BOTH("exch.b32", ExchB32), BOTH("min.u32", MinU32), BOTH("max.u32", MaxU32),
    BOTH("and.b32", AndB32), BOTH("or.b32", OrB32), BOTH("xor.b32", XorB32), BOTH("inc.u32", IncU32),
    BOTH("add.f32", AddF32), BOTH("add.u64", AddU64), BOTH("exch.b64", ExchB64), BOTH("min.u64", MinU64),
    BOTH("add.f64", AddF64), BOTH("cas.b32", CasB32), BOTH("cas.b64", CasB64),
    REDS("add.u32", AddU32), REDS("or.b32", OrB32), REDS("add.f32", AddF32), REDS("add.u64", AddU64),
    REDS("add.f64", AddF64),
    COPY("ca", 4, false), COPY("ca", 8, false), COPY("ca", 16, false), COPY("cg", 16, true),
};

struct Launch {  // as the batch file holds it
    char name[32];
    Row rows[ROWS];
};

int main(int argc, char** argv) {
    FILE* file = argc == 2 ? fopen(argv[1], "rb") : nullptr;
    if (!file) { fprintf(stderr, "usage: access BATCH\n"); return 2; }
    std::vector<uint32_t> initial(ROWS * REGION / 4);
    for (size_t i = 0; i < initial.size(); ++i) initial[i] = word(4 * i, 0);
    char *read_only, *scratch;
    uint64_t *verdict, wrong;
    CUDA(cudaMalloc(&read_only, ROWS * REGION));
    CUDA(cudaMalloc(&scratch, ROWS * REGION));
    CUDA(cudaMalloc(&verdict, sizeof *verdict));
    CUDA(cudaMemset(verdict, 0, sizeof *verdict));
    CUDA(cudaMemcpy(read_only, initial.data(), ROWS * REGION, cudaMemcpyHostToDevice));
    int launches = 0, failed = 0;
    for (Launch launch; fread(&launch, sizeof launch, 1, file) == 1; ++launches) {
        const Kernel* kernel = nullptr;
        for (const Kernel& k : kernels) if (!strncmp(k.name, launch.name, sizeof launch.name)) kernel = &k;
        if (!kernel) { fprintf(stderr, "launch %d: unknown instruction %.32s\n", launches, launch.name); return 2; }
        CUDA(cudaMemcpyToSymbol(rows, launch.rows, sizeof launch.rows));
        CUDA(cudaFuncSetAttribute(kernel->run, cudaFuncAttributeMaxDynamicSharedMemorySize, TILE));
        kernel->run<<<1, LANES, TILE>>>(kernel->writes ? scratch : read_only, verdict);
        CUDA(cudaGetLastError());
        CUDA(cudaMemcpy(&wrong, verdict, sizeof wrong, cudaMemcpyDeviceToHost));
        if (!wrong) continue;
        ++failed;
        fprintf(stderr, "launch %d (%s): wrong data in rows", launches, kernel->name);
        for (int k = 0; k < ROWS; ++k) if (wrong >> k & 1) fprintf(stderr, " %d", k);
        fprintf(stderr, "\n");
    }
    printf("%d launches, %d failed\n", launches, failed);
    return failed > 0;
}
