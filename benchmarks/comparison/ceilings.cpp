// What the machine can do at most: memory read at one size, and multiply-adds per second of each
// kind of unit. One JSON object on standard output; a unit the compiler sees none of is absent.
//
//     ceilings THREADS BYTES SECONDS     (BYTES 0: no read; SECONDS per measurement)

#include <immintrin.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Work done by all threads per second; `pass(thread)` does some and says how much.
double rate(int threads, double seconds, const std::function<double(int)>& pass) {
    std::atomic<int> ready{0};
    std::vector<double> rates(threads);
    std::vector<std::thread> pool;
    for (int t = 0; t < threads; ++t)
        pool.emplace_back([&, t] {
            pass(t);
            ready.fetch_add(1);
            while (ready.load() < threads) std::this_thread::yield();
            double done = 0, start = now(), end = start;
            while (end - start < seconds) done += pass(t), end = now();
            rates[t] = done / (end - start);
        });
    double sum = 0;
    for (int t = 0; t < threads; ++t) pool[t].join(), sum += rates[t];
    return sum;
}

#if defined(__AVX512F__)
constexpr int kBytes = 64, kChains = 12;
#else
constexpr int kBytes = 32, kChains = 10;
#endif
typedef long long Words __attribute__((vector_size(kBytes)));
typedef float Floats __attribute__((vector_size(kBytes)));

// Each thread reads one contiguous share again and again, as a decode step reads its weights.
double read_rate(int threads, size_t bytes, double seconds) {
    const size_t step = kBytes * 8;
    const size_t share = bytes / threads / step * step;
    void* memory = mmap(nullptr, share * threads, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) std::perror("mmap"), std::exit(1);
    madvise(memory, share * threads, MADV_HUGEPAGE);
    std::memset(memory, 1, share * threads);
    const char* base = static_cast<const char*>(memory);
    return rate(threads, seconds, [&](int t) {
        Words sums[8] = {};
        const char* at = base + share * t;
        for (size_t i = 0; i < share; i += step)
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j)
                sums[j] ^= *reinterpret_cast<const Words*>(at + i + j * kBytes);
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) asm volatile("" ::"v"(sums[j]));
        return double(share);
    });
}

constexpr int kRounds = 1 << 16;

double fma_rate(int threads, double seconds) {
    return rate(threads, seconds, [](int) {
        Floats sums[kChains] = {}, a = {}, b = {};
        asm volatile("" : "+v"(a), "+v"(b));
        for (int i = 0; i < kRounds; ++i)
#pragma GCC unroll 12
            for (int j = 0; j < kChains; ++j) {
                sums[j] = a * b + sums[j];
                asm volatile("" : "+v"(sums[j]));
            }
        return 2.0 * (kBytes / 4) * kChains * kRounds;
    });
}

#if defined(__AVX512VNNI__)
double vnni_rate(int threads, double seconds) {
    return rate(threads, seconds, [](int) {
        __m512i sums[kChains] = {}, a = {}, b = {};
        asm volatile("" : "+v"(a), "+v"(b));
        for (int i = 0; i < kRounds; ++i)
#pragma GCC unroll 12
            for (int j = 0; j < kChains; ++j) {
                sums[j] = _mm512_dpbusd_epi32(sums[j], a, b);
                asm volatile("" : "+v"(sums[j]));
            }
        return 128.0 * kChains * kRounds;
    });
}
#endif

#if defined(__AMX_INT8__)
// Linux hands out the tile registers on request only.
bool have_tiles() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

double amx_rate(int threads, double seconds) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    return rate(threads, seconds, [&](int) {
        _tile_loadconfig(&config);
        for (int i = 0; i < kRounds / 16; ++i) {
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_release();
        return 4.0 * 2 * 16 * 16 * 64 * (kRounds / 16);
    });
}
#endif

void unit(const char* name, double per_second) {
    std::printf("%s\"%s\": %.1f", std::strcmp(name, "fp32_gflops") ? ", " : "", name,
                per_second / 1e9);
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 4) return std::fputs("ceilings THREADS BYTES SECONDS\n", stderr), 2;
    const int threads = std::atoi(argv[1]);
    const size_t bytes = std::strtoull(argv[2], nullptr, 10);
    const double seconds = std::atof(argv[3]);
    if (bytes) {
        std::printf("{\"read_gbs\": %.1f}\n", read_rate(threads, bytes, seconds) / 1e9);
        return 0;
    }
    std::printf("{");
    unit("fp32_gflops", fma_rate(threads, seconds));
#if defined(__AVX512VNNI__)
    unit("vnni_gops", vnni_rate(threads, seconds));
#endif
#if defined(__AMX_INT8__)
    if (have_tiles()) unit("amx_gops", amx_rate(threads, seconds));
#endif
    std::printf("}\n");
}
