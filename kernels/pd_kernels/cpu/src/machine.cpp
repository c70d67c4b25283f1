// What this library was built for and whether the kernel lets the process use AMX tiles.
#include "amx.h"
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

extern "C" const char* pd_isa() {
#if defined(PD_HAS_AMX)
    return "AMX-BF16";
#elif defined(__AVX512BF16__)
    return "AVX512-BF16";
#elif defined(__AVX512F__)
    return "AVX-512";
#elif defined(__AVX2__)
    return "AVX2";
#else
    return "generic vectors";
#endif
}

// 1 when tiles may be used: compiled in, and granted by arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
extern "C" int pd_enable_amx() {
#if defined(PD_HAS_AMX) && defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0 ? 1 : 0;
#else
    return 0;
#endif
}
