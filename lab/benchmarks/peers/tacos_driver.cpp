// TACOS' all-gather on any mesh: tacos_driver CHUNKS_PER_CHIP CHUNK_BYTES < cables > sends
// Reads the number of chips, then a pair of chips per cable. Writes a line "arrival src dst chunk" per send, and TACOS'
// own time, in microseconds, to stderr. TACOS keeps no list of its sends, so the linker puts recordSend in front of its
// transferChunk (--wrap): its sources stay as they are.
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <tacos/collective/all_gather.h>
#include <tacos/synthesizer/synthesizer.h>

#define TRANSFER_CHUNK "_ZN5tacos19TimeExpandedNetwork13transferChunkEiiid"

constexpr double GIB_PER_S = 100e9 / (1 << 30);

void transferChunk(tacos::TimeExpandedNetwork*, int src, int dst, int chunk, double arrival) asm("__real_" TRANSFER_CHUNK);
void recordSend(tacos::TimeExpandedNetwork*, int src, int dst, int chunk, double arrival) asm("__wrap_" TRANSFER_CHUNK);

void recordSend(tacos::TimeExpandedNetwork* network, int src, int dst, int chunk, double arrival) {
    std::printf("%.6f %d %d %d\n", arrival, src, dst, chunk);
    transferChunk(network, src, dst, chunk, arrival);
}

struct Cables : tacos::Topology {
    Cables() {
        int chips, a, b;
        std::cin >> chips;
        setNpusCount_(chips);
        while (std::cin >> a >> b) connect_(a, b, GIB_PER_S, 0, true);
    }
};

int main(int, char** arguments) {
    const Cables cables;
    const tacos::AllGather gather(cables.npusCount(), std::atoi(arguments[1]));
    tacos::Synthesizer synthesizer;
    const double microseconds = synthesizer.solve(cables, gather, std::atoll(arguments[2]));
    std::fprintf(stderr, "%.6f\n", microseconds);
}
