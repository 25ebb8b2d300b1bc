// out[M, N] = a[M, K] @ b[N, K]^T (+ bias[N]) on the Hopper generation: `product.py` launches it.
//
// A program has GROUPS groups of four warps, which multiply, and one warp that copies. A tile is 64 rows for
// each group of one operand, the tall one (a, or b with SWAP), by WIDTH rows of the other, the flat one, which
// all groups read. wgmma takes any multiple of 8 as its width, and so does a tile's flat side. The copying
// warp fills DEPTH buffers of BLOCKS x 64 of K as fast as they become free (TMA); a group multiplies full
// buffers and waits only for that warp. K is added from front to back into one fp32 accumulator, 16 products at
// a time, which gives the bits of `matmul/kernels.py`.
//
// A program computes every `gridDim.x`-th tile, so that copies for its next tile run while it writes one.
// The compiler options define GROUPS, WIDTH, BLOCKS, DEPTH, SWAP, HALF (the PTX type of a and b: bf16 or f16),
// OUT_FLOAT (out is fp32), BIAS (0: none, 1: of a's type, 2: fp32) and ALIGNED (rows of out begin at multiples
// of 16 bytes). `product.py` puts MULTIPLY(acc, a, b), the instruction, before this text.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(64) TensorMap { u64 words[16]; };

#if OUT_FLOAT
typedef float Out;
#else
typedef u16 Out;
#endif
#if BIAS == 2
typedef float Bias;
#else
typedef u16 Bias;
#endif

constexpr int TALL_BLOCK = GROUPS * 64 * 128, FLAT_BLOCK = WIDTH * 128;  // bytes of 64 of K
constexpr int TALL_BYTES = BLOCKS * TALL_BLOCK, FLAT_BYTES = BLOCKS * FLAT_BLOCK;
constexpr int STEP = 64 * BLOCKS;
// The registers of a thread: all of a processor's are used, mostly by the warps that multiply.
constexpr int FOR_COPIES = GROUPS <= 2 ? 40 : GROUPS == 3 ? 56 : 64;
constexpr int FOR_PRODUCTS = GROUPS <= 2 ? 232 : GROUPS == 3 ? 152 : 104;

__device__ __forceinline__ void wait(u32 barrier, u32 phase) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier), "r"(phase) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const TensorMap& from, int k, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      " [%0], [%1, {%2, %3}], [%4];" ::"r"(to), "l"(&from), "r"(k), "r"(row), "r"(barrier) : "memory");
}

// The operand of wgmma at an address of shared memory: K-major, swizzled rows of 128 bytes, 8 rows in 1024.
__device__ __forceinline__ u64 operand(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | (u64)1 << 16 | (u64)64 << 32 | (u64)1 << 62;
}

__device__ __forceinline__ u32 rounded(float low, float high) {
  u32 both;
  asm("cvt.rn." HALF "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float widened(u16 x) {
  float y;
  asm("cvt.f32." HALF " %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ float widened(float x) { return x; }

// The transpose of an 8 x 8 matrix across a warp, where each thread has two neighbours of a row.
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

struct Output {
  Out* out;
  const Bias* bias;
  int rows, columns, stride;

  __device__ __forceinline__ void one(int row, int column, float x) const {
    if (row >= rows || column >= columns) return;
    if (BIAS) x += widened(bias[column]);
    Out* to = out + (long long)row * stride + column;
#if OUT_FLOAT
    *to = x;
#else
    *to = (u16)rounded(x, 0.f);
#endif
  }

  __device__ __forceinline__ void added(int column, float& low, float& high) const {
    if (!BIAS) return;
    if (column < columns) low += widened(bias[column]);
    if (column + 1 < columns) high += widened(bias[column + 1]);
  }
};

// Stores a thread's numbers: rows `quad` and `quad + 8` of a warp's 16, two neighbours of every 8 columns.
__device__ __forceinline__ void store(const float* acc, int tall, int flat, u32 lane, const Output& to) {
  const int quad = lane / 4, pair = lane % 4 * 2;
#if OUT_FLOAT || !ALIGNED
#pragma unroll
  for (int i = 0; i < WIDTH / 2; i++) {
    const int row = tall + quad + (i & 2) * 4, column = flat + i / 4 * 8 + pair + (i & 1);
    SWAP ? to.one(column, row, acc[i]) : to.one(row, column, acc[i]);
  }
#elif SWAP
  float bias[2] = {0.f, 0.f};
  for (int i = 0; i < 2; i++)
    if (BIAS && tall + quad + 8 * i < to.columns) bias[i] = widened(to.bias[tall + quad + 8 * i]);
#pragma unroll
  for (int j = 0; j < WIDTH / 8; j++) {
    const int row = flat + 8 * j + quad;
    u16* line = to.out + (long long)row * to.stride + tall + pair;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float *x = acc + 4 * j + 2 * i;
      const u32 both = transposed(BIAS ? rounded(x[0] + bias[i], x[1] + bias[i]) : rounded(x[0], x[1]));
      if (row < to.rows && tall + 8 * i < to.columns) *(u32*)(line + 8 * i) = both;
    }
  }
#else
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const int row = tall + quad + 8 * i;
    u16* line = to.out + (long long)row * to.stride + flat;
#pragma unroll
    for (int j = 0; j < WIDTH / 8; j += 4) {
      u32 x[4];
#pragma unroll
      for (int c = 0; c < 4 && j + c < WIDTH / 8; c++) {
        float low = acc[4 * (j + c) + 2 * i], high = acc[4 * (j + c) + 2 * i + 1];
        to.added(flat + 8 * (j + c) + pair, low, high);
        x[c] = rounded(low, high);
      }
      if (j + 4 <= WIDTH / 8) {
        // exchange between four threads: from 4 bytes of each of four blocks of 8 columns to 16 bytes of one
        const bool odd = lane & 1, late = lane & 2;
#pragma unroll
        for (int c = 0; c < 4; c += 2) {
          const u32 got = __shfl_xor_sync(~0u, odd ? x[c] : x[c + 1], 1);
          (odd ? x[c] : x[c + 1]) = got;
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
          const u32 got = __shfl_xor_sync(~0u, late ? x[c] : x[c + 2], 2);
          (late ? x[c] : x[c + 2]) = got;
        }
        const int column = 8 * (j + lane % 4);
        if (row < to.rows && flat + column < to.columns)
          *(uint4*)(line + column) = make_uint4(x[0], x[1], x[2], x[3]);
      } else {
#pragma unroll
        for (int c = 0; c < WIDTH / 8 % 4; c++) {
          const int column = 8 * (j + c) + pair;
          if (row < to.rows && flat + column < to.columns) *(u32*)(line + column) = x[c];
        }
      }
    }
  }
#endif
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
product(const __grid_constant__ TensorMap tall_map, const __grid_constant__ TensorMap flat_map, Out* out,
        const Bias* bias, int talls, int flats, int K, int stride, int tall_apart, int flat_apart, int order) {
  extern __shared__ unsigned char memory[];
  const u32 tall_smem = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023;
  const u32 flat_smem = tall_smem + DEPTH * TALL_BYTES;
  const u32 full = flat_smem + DEPTH * FLAT_BYTES, empty = full + 8 * DEPTH;  // barriers
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const u32 lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&tall_map) : "memory");
    asm volatile("prefetch.tensormap [%0];" ::"l"(&flat_map) : "memory");
    for (int i = 0; i < DEPTH; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(full + 8 * i), "r"(1));
      asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * i), "r"(GROUPS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  const int tall_tiles = (talls + tall_apart - 1) / tall_apart;
  const int flat_tiles = (flats + flat_apart - 1) / flat_apart;
  const int rows = SWAP ? flat_tiles : tall_tiles, columns = SWAP ? tall_tiles : flat_tiles;
  // about `order` row tiles read a column tile while it is in L2 (`steps.tile_position`)
  const int batches = max((rows + order / 2) / order, 1), batch = (rows + batches - 1) / batches;
  auto place = [&](int tile, int& tall, int& flat) {
    const int first = tile / (batch * columns) * batch, within = tile % (batch * columns);
    const int size = min(rows - first, batch), row = first + within % size, column = within / size;
    tall = (SWAP ? column : row) * tall_apart;
    flat = (SWAP ? row : column) * flat_apart;
  };

  int stage = 0;
  u32 phase = 0;
  if (warp >= 4 * GROUPS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FOR_COPIES));
    if (warp != 4 * GROUPS || lane != 0) return;
    for (int tile = blockIdx.x; tile < rows * columns; tile += gridDim.x) {
      int tall, flat;
      place(tile, tall, flat);
      for (int k = 0; k < K; k += STEP) {
        wait(empty + 8 * stage, phase ^ 1);
        const u32 ready = full + 8 * stage;
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(ready),
                     "r"(TALL_BYTES + FLAT_BYTES) : "memory");
#pragma unroll
        for (int i = 0; i < BLOCKS; i++) {
          copy(tall_smem + stage * TALL_BYTES + i * TALL_BLOCK, tall_map, k + 64 * i, tall, ready);
          copy(flat_smem + stage * FLAT_BYTES + i * FLAT_BLOCK, flat_map, k + 64 * i, flat, ready);
        }
        if (++stage == DEPTH) stage = 0, phase ^= 1;
      }
    }
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FOR_PRODUCTS));
  const bool tells = warp % 4 == 0 && lane == 0;
  const Output output = {out, bias, SWAP ? flats : talls, SWAP ? talls : flats, stride};
  for (int tile = blockIdx.x; tile < rows * columns; tile += gridDim.x) {
    int tall, flat;
    place(tile, tall, flat);
    float acc[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) acc[i] = 0.f;
    u32 before = 0;
    for (int k = 0; k < K; k += STEP) {
      wait(full + 8 * stage, phase);
      const u64 a = operand(tall_smem + stage * TALL_BYTES + warp / 4 * 8192);
      const u64 b = operand(flat_smem + stage * FLAT_BYTES);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 4 * BLOCKS; i++)
        MULTIPLY(acc, a + i / 4 * (TALL_BLOCK / 16) + i % 4 * 2, b + i / 4 * (FLAT_BLOCK / 16) + i % 4 * 2);
      asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
      // the previous step has ended, so its buffers are free
      if (k && tells) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(before) : "memory");
      before = empty + 8 * stage;
      if (++stage == DEPTH) stage = 0, phase ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
    if (tells) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(before) : "memory");
    store(acc, tall + 16 * warp, flat, lane, output);
  }
}
