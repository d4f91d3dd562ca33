// Matrix transpose through a 32x32 shared tile: dst[c][r] = src[r][c], float, any rows and cols.
//
// One CTA a tile. `plain`, `pad1` and `xor` run 32x8 threads, four rows each, and differ only in where the tile keeps
// element (r, c): r*32 + c, r*33 + c, r*32 + (c ^ r). `vec4` runs 8x32 threads that move 16 bytes a lane in global
// memory and store 16 bytes a lane in shared memory; the tile's 16-byte chunks are permuted so that the four scalar
// column reads stay free of conflicts. A transpose does no arithmetic: elements travel as 32-bit words.
#include "common.cuh"

constexpr int kTile = 32;

enum Variant { kPlain, kPad1, kXor };

template <Variant V>
__device__ int tile_word(int r, int c) {
  return V == kPad1 ? r * (kTile + 1) + c : V == kXor ? r * kTile + (c ^ r) : r * kTile + c;
}

// Loads and the store they feed share one predicate, element by element: at an edge a lane that is off does nothing.
template <Variant V>
__global__ void transpose(const float* src, float* dst, int rows, int cols) {
  __shared__ float tile[kTile * (V == kPad1 ? kTile + 1 : kTile)];
  const uint32_t base = shared_address(tile);
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile, tx = threadIdx.x, ty = threadIdx.y;
#pragma unroll
  for (int j = 0; j < kTile; j += 8) {
    const int row = row0 + ty + j, col = col0 + tx;
    if (row < rows && col < cols) {
      uint32_t word;
      LDG32(word, src + row * cols + col);                   // @site src.load
      STS32(base + 4 * tile_word<V>(ty + j, tx), word);      // @site tile.store
    }
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kTile; j += 8) {
    const int row = col0 + ty + j, col = row0 + tx;  // of dst
    if (row < cols && col < rows) {
      uint32_t word;
      LDS32(word, base + 4 * tile_word<V>(tx, ty + j));      // @site tile.load
      STG32(dst + row * rows + col, word);                   // @site dst.store
    }
  }
}

// rows and cols are multiples of 4, so a 16-byte vector is inside or outside as a whole.
__global__ void transpose_vec4(const float* src, float* dst, int rows, int cols) {
  __shared__ __align__(16) float tile[kTile * kTile];
  const uint32_t base = shared_address(tile);
  const int row0 = blockIdx.y * kTile, col0 = blockIdx.x * kTile, x = threadIdx.x, y = threadIdx.y;
  if (row0 + y < rows && col0 + 4 * x < cols) {
    uint4 words;
    LDG128(words, src + (row0 + y) * cols + col0 + 4 * x);             // @site src.load
    STS128(base + 4 * (y * kTile + 4 * (x ^ (y >> 2 & 7))), words);    // @site tile.store
  }
  __syncthreads();
  if (col0 + y < cols && row0 + 4 * x < rows) {
    uint32_t word[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int where = (4 * x + i) * kTile + 4 * (y >> 2 ^ (x & 7)) + (y & 3);
      LDS32(word[i], base + 4 * where);                                // @site tile.load
    }
    const uint4 words = make_uint4(word[0], word[1], word[2], word[3]);
    STG128(dst + (col0 + y) * rows + row0 + 4 * x, words);             // @site dst.store
  }
}

__global__ void fill(uint32_t* words, int count) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) words[i] = i * 2654435761u;
}

__global__ void count_wrong(const float* src, const float* dst, int rows, int cols, unsigned* wrong) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, r = i / cols, c = i % cols;
  if (r < rows && __float_as_uint(src[i]) != __float_as_uint(dst[c * rows + r])) atomicAdd(wrong, 1);
}

Experiment prepare(Case& c) {
  const int rows = c.get("rows", 2048), cols = c.get("cols", 2048), offset = c.get("src_offset", 0);
  const bool vec4 = c.variant == "vec4";
  const void* kernel = c.variant == "plain"  ? reinterpret_cast<const void*>(transpose<kPlain>)
                       : c.variant == "pad1" ? reinterpret_cast<const void*>(transpose<kPad1>)
                       : c.variant == "xor"  ? reinterpret_cast<const void*>(transpose<kXor>)
                       : vec4                ? reinterpret_cast<const void*>(transpose_vec4)
                                             : nullptr;
  if (!kernel) fail(2, "variant '" + c.variant + "' is none of plain, pad1, xor, vec4");
  if (rows < 1 || cols < 1 || static_cast<int64_t>(rows) * cols > 1 << 28)
    fail(2, c.text + ": not a matrix of 1 to 2^28 elements");
  if (vec4 && (rows % 4 || cols % 4 || offset % 4))
    fail(2, c.text + ": vec4 needs rows, cols and src_offset in multiples of 4");

  const int count = rows * cols;
  float* src = device_array<float>(count + offset) + offset;
  float* dst = device_array<float>(count);
  unsigned* wrong = device_array<unsigned>(1);
  fill<<<(count + 255) / 256, 256>>>(reinterpret_cast<uint32_t*>(src), count);
  CUDA_CHECK(cudaMemset(dst, 0xff, sizeof(float) * count));
  CUDA_CHECK(cudaMemset(wrong, 0, sizeof(unsigned)));

  const dim3 grid((cols + kTile - 1) / kTile, (rows + kTile - 1) / kTile);
  Experiment e{kernel, grid, vec4 ? dim3(8, 32) : dim3(32, 8), 0};
  e.launch = [=] {
    const void *arguments[] = {&src, &dst, &rows, &cols};
    CUDA_CHECK(cudaLaunchKernel(kernel, e.grid, e.block, const_cast<void**>(arguments), 0));
  };
  e.check = [=] {
    count_wrong<<<(count + 255) / 256, 256>>>(src, dst, rows, cols, wrong);
    const unsigned n = to_host(wrong, 1)[0];
    return n ? std::to_string(n) + " of " + std::to_string(count) + " elements are wrong" : std::string();
  };
  return e;
}

int main(int argc, char** argv) { return run_program(argc, argv, prepare); }
