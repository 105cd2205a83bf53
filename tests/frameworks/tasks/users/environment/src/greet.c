#include <stdio.h>
#include <unistd.h>

int main(void) {
    printf("hello from %d\n", (int)getuid());
    return 0;
}
