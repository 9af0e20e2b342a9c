/* A check that also holds in a release build. */
#pragma once

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);   \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)
